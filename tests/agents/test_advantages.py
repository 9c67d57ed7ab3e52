import pytest
from rows import rewarded

from rlenv.agents.advantages import normalise, score


def test_advantages_are_rewards_normalised_by_the_group() -> None:
    # mean 1, population standard deviation sqrt((1 + 0 + 0 + 1) / 4) = 0.70711
    assert normalise([0.0, 1.0, 1.0, 2.0]) == pytest.approx([-1.414214, 0.0, 0.0, 1.414214], abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5, 1e9])
def test_equal_rewards_give_advantages_of_exactly_zero(reward: float) -> None:
    assert normalise([reward] * 4) == [0.0] * 4


def test_float_noise_is_not_blown_up_to_a_signal() -> None:
    assert normalise([1.0, 1.0 + 1e-9, 1.0 - 1e-9, 1.0]) == [0.0] * 4
    assert normalise([0.1 + 0.2, 0.3]) == [0.0] * 2


def test_small_but_real_differences_are_kept() -> None:
    assert normalise([0.0, 0.001]) == pytest.approx([-1.0, 1.0])


def test_groups_of_equal_rewards_are_counted() -> None:
    scored = score([rewarded(1, 1, 1, 1), rewarded(0, 0, 0, 0), rewarded(0, 1)])
    assert (scored.groups, scored.zero_std_groups) == (3, 2)
    assert scored.advantages == (0.0,) * 8 + (-1.0, 1.0)


def test_each_group_has_a_baseline_of_its_own() -> None:
    assert score([rewarded(0, 1), rewarded(10, 11)]).advantages == (-1.0, 1.0, -1.0, 1.0)


def test_a_lone_survivor_is_dropped_and_counted() -> None:
    scored = score([rewarded(1.0, failures=3), rewarded(0, 1)])
    assert (scored.lone_survivors, scored.groups) == (1, 1)
    assert scored.advantages == (-1.0, 1.0)


def test_failures_are_counted_by_cause_and_stay_out_of_the_baseline() -> None:
    scored = score([rewarded(0, 1, failures=2), rewarded(failures=4)])
    assert scored.advantages == (-1.0, 1.0)
    assert scored.failures == {"TimeoutError": 6}
    assert scored.failed_groups == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="'toy', seed 0: the reward is"):
        score([rewarded(0.0, reward)])


def test_groups_of_one_prompt_are_told_apart_whatever_their_order() -> None:
    easy, hard, broken = rewarded(1, 1, 0), rewarded(0, 0, 1), rewarded(1, 0, failures=1)
    for order in ([easy, hard, broken], [broken, hard, easy], [hard, easy, broken]):
        scored = score(order)
        alone = [score([group]).advantages for group in order]
        assert scored.advantages == sum(alone, ())
