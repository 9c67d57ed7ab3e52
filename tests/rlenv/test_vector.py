"""Vectors of text environments go in, beside Gymnasium's own; batches, order, requests and failures come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import rlenv
import rlenv.spaces
from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.infos import batch_infos
from rlenv.vector import TextVectorEnv

Scripted = Callable[..., ScriptedEngine]
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


class Countdown(rlenv.TextEnv):
    """An episode of `length` turns, each worth 1, that tells sparse infos of many kinds."""

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.length = length

    def start(self, options: Mapping[str, Any]) -> str:
        return f"start {self.np_random.integers(10**6)} {options.get('hint', '')}"

    def turn(self, action: str) -> rlenv.Turn:
        if action == "raise":
            raise ZeroDivisionError("by the task")
        assert self.turns is not None
        info: dict[str, Any] = {"turn": self.turns, "half": self.turns / 2, "said": action, "rows": np.arange(2)}
        if self.turns == self.length:
            info |= {"score": {"total": 1.0, "name": "done"}, "over": True}
        return rlenv.Turn({"step": 1.0}, f"turn {self.turns}", terminated=self.turns == self.length, info=info)


class Reusing(gymnasium.Env[str, str]):
    """Returns the same info dict from every call, as careless environments do."""

    observation_space = rlenv.spaces.Text()
    action_space = rlenv.spaces.Text()

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"score": 0.0, "parts": []}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.info["score"] = 0.0
        self.info["parts"].clear()
        return "question", self.info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.info["score"] = 7.0
        self.info["parts"].append("right")
        return "verdict", 7.0, True, False, self.info


def countdowns(lengths: Sequence[int], mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> TextVectorEnv:
    return TextVectorEnv([Countdown(length) for length in lengths], autoreset_mode=mode)


def bound(
    engine: ScriptedEngine, lengths: Sequence[int], mode: AutoresetMode = AutoresetMode.NEXT_STEP
) -> TextVectorEnv:
    return TextVectorEnv([EngineBoundEnv(Countdown(length), engine) for length in lengths], autoreset_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_every_batch_equals_gymnasiums_own(mode: AutoresetMode) -> None:
    lengths = (1, 2, 3, 5)
    ours = countdowns(lengths, mode)
    theirs = SyncVectorEnv([lambda length=length: Countdown(length) for length in lengths], autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"]
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    assert data_equivalence(
        ours.reset(seed=3, options={"hint": "h"}), theirs.reset(seed=3, options={"hint": "h"}), exact=True
    )
    for step in range(12):
        actions = tuple(f"action {step} {slot}" for slot in range(4))
        assert data_equivalence(ours.step(actions), theirs.step(actions), exact=True)


def test_disabled_autoreset_equals_gymnasiums_own_with_a_reset_mask() -> None:
    lengths = (1, 2, 3, 5)
    ours = countdowns(lengths, AutoresetMode.DISABLED)
    theirs = SyncVectorEnv([lambda length=length: Countdown(length) for length in lengths], autoreset_mode="Disabled")
    assert data_equivalence(ours.reset(seed=3), theirs.reset(seed=3), exact=True)
    for _ in range(12):
        batch = ours.step(["a"] * 4)
        assert data_equivalence(batch, theirs.step(["a"] * 4), exact=True)
        over = batch[2] | batch[3]
        if over.any():
            reset = [envs.reset(options={"reset_mask": over.copy()}) for envs in (ours, theirs)]
            assert data_equivalence(reset[0], reset[1], exact=True)


def test_disabled_autoreset_refuses_a_slot_that_was_not_reset() -> None:
    envs = countdowns((1, 2), AutoresetMode.DISABLED)
    with pytest.raises(ResetNeeded, match="slot 0"):
        envs.step("a")
    envs.reset(seed=0)
    envs.step("a")
    with pytest.raises(ResetNeeded, match=r"slot 0.*reset_mask"):
        envs.step("a")
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert list(envs.step("a")[2]) == [True, True]


def test_the_options_of_the_caller_are_left_as_they_were() -> None:
    envs = countdowns((1, 1))
    options = {"reset_mask": np.array([True, True]), "hint": "h"}
    observations, _ = envs.reset(seed=0, options=options)
    assert set(options) == {"reset_mask", "hint"}
    assert all(observation.endswith(" h") for observation in observations)


@pytest.mark.parametrize("mask", [np.array([True]), np.array([1, 0]), np.array([False, False])])
def test_a_mask_that_fits_nothing_is_refused(mask: np.ndarray) -> None:
    with pytest.raises(rlenv.ConfigError, match="reset_mask"):
        countdowns((1, 1)).reset(options={"reset_mask": mask})


def test_a_mask_resets_only_its_slots_and_takes_seeds_for_them() -> None:
    envs = countdowns((5, 5, 5), AutoresetMode.DISABLED)
    first, _ = envs.reset(seed=[1, 1, 1])
    envs.step("a")
    observations, _ = envs.reset(seed=[1, None, 1], options={"reset_mask": np.array([True, False, False])})
    assert observations == (first[0], "turn 1", "turn 1")


def test_one_seed_counts_up_and_a_list_gives_each_slot_its_own() -> None:
    envs = countdowns((1,) * 4)
    assert envs.reset(seed=5)[0] == envs.reset(seed=[5, 6, 7, 8])[0]
    group, _ = envs.reset(seed=[5, 5, 5, 5])
    assert len(set(group)) == 1
    with pytest.raises(rlenv.ConfigError, match="3 seeds for 4"):
        envs.reset(seed=[1, 2, 3])


def test_the_terminal_text_and_score_survive_an_environment_that_reuses_its_info() -> None:
    envs = TextVectorEnv([Reusing(), Reusing()], autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    observations, _, _, _, infos = envs.step("a")
    assert observations == ("question", "question")
    assert list(infos["final_obs"]) == ["verdict", "verdict"]
    assert list(infos["final_info"]["score"]) == [7.0, 7.0]
    assert list(infos["final_info"]["parts"]) == [["right"], ["right"]]
    assert list(infos["score"]) == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_every_episode_has_its_length_and_return(mode: AutoresetMode) -> None:
    envs = RecordEpisodeStatistics(countdowns((3, 3), mode))
    envs.reset(seed=0)
    ended = []
    while len(ended) < 8:
        *_, infos = envs.step("a")
        for slot in np.flatnonzero(infos.get("_episode", np.zeros(2))):
            ended.append((int(infos["episode"]["l"][slot]), float(infos["episode"]["r"][slot])))
    assert ended == [(3, 3.0)] * 8


def test_masked_resets_keep_the_statistics_of_the_other_slots() -> None:
    envs = RecordEpisodeStatistics(countdowns((1, 3), AutoresetMode.DISABLED))
    envs.reset(seed=0)
    envs.step("a")
    for _ in range(2):
        envs.reset(options={"reset_mask": np.array([True, False])})
        *_, infos = envs.step("a")
    assert list(infos["episode"]["l"]) == [1, 3]


def test_one_step_submits_every_request_before_it_waits(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "a" * 10, delay=0.002)
    envs = bound(engine, (3,) * 64)
    envs.reset(seed=0)
    *_, infos = envs.step(rlenv.Sample())
    assert engine.peak_in_flight == 64
    assert infos["_completion"].all()
    assert [completion.text for completion in infos["completion"]] == ["a" * 10] * 64


def test_completions_come_in_the_order_of_the_slots_whatever_order_they_arrive_in(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "a" * (sample.seed or 0), delay=0.001)
    envs = bound(engine, (3,) * 4)
    envs.reset(seed=0)
    *_, infos = envs.step([rlenv.Sample(seed=seed) for seed in (40, 1, 20, 2)])
    assert [len(said) for said in infos["said"]] == [40, 1, 20, 2]


def test_text_and_samples_may_be_mixed(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "sampled")
    envs = bound(engine, (3, 3, 3))
    envs.reset(seed=0)
    *_, infos = envs.step(["by hand", rlenv.Sample(), "by hand"])
    assert list(infos["said"]) == ["by hand", "sampled", "by hand"]
    assert list(infos["_completion"]) == [False, True, False]


def test_next_step_submits_nothing_for_a_slot_whose_action_is_ignored(scripted: Scripted) -> None:
    asked: list[int] = []

    def policy(ids: tuple[int, ...], sample: rlenv.Sample) -> str:
        asked.append(len(ids))
        return "x"

    envs = bound(scripted(policy), (1, 2))
    first, _ = envs.reset(seed=0)
    envs.step(rlenv.Sample())
    assert len(asked) == 2
    observations, rewards, terminations, truncations, infos = envs.step(rlenv.Sample())
    assert len(asked) == 3
    assert observations[0].startswith("start") and observations[0] != first[0]
    assert (rewards[0], terminations[0], truncations[0]) == (0.0, False, False)
    assert list(infos["_completion"]) == [False, True]


def test_a_subset_steps_while_the_rest_is_on_its_way(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "a" * (sample.seed or 0), delay=0.005)
    envs = bound(engine, (9,) * 3)
    envs.reset(seed=0)
    envs.send([rlenv.Sample(seed=1000), rlenv.Sample(seed=1)], slots=[2, 0])
    for turn in (1, 2, 3):
        slots, observations, rewards, terminations, truncations, infos = envs.recv()
        assert (list(slots), observations, list(rewards)) == ([0], (f"turn {turn}",), [1.0])
        assert len(terminations) == len(truncations) == len(infos["completion"]) == 1
        envs.send(rlenv.Sample(seed=1), slots=slots)
    with pytest.raises(rlenv.ConfigError, match="slots \\[0, 2\\] are on their way"):
        envs.step(rlenv.Sample(seed=1))
    with pytest.raises(rlenv.ConfigError, match="slot 2 is on its way"):
        envs.send("again", slots=[2])
    envs.close()
    assert engine.in_flight == 0


def test_recv_returns_all_that_are_done_in_slot_order() -> None:
    envs = countdowns((3,) * 4)
    envs.reset(seed=0)
    envs.send(["d", "b", "a"], slots=[3, 1, 0])
    slots, *_, infos = envs.recv(3)
    assert list(slots) == [0, 1, 3]
    assert list(infos["said"]) == ["a", "b", "d"]
    with pytest.raises(rlenv.ConfigError, match="wait for ever"):
        envs.recv()


def test_a_reset_drops_what_was_on_its_way(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "slow" if sample.seed else "quick", delay=0.01)
    envs = bound(engine, (3, 3))
    envs.reset(seed=0)
    envs.send(rlenv.Sample(seed=1))
    envs.reset(seed=0)
    assert engine.in_flight == 0
    assert envs.step(rlenv.Sample())[4]["turn"].tolist() == [1, 1]


def test_an_error_of_one_slot_is_raised_after_the_others_are_done() -> None:
    envs = countdowns((3, 3, 3))
    envs.reset(seed=0)
    with pytest.raises(ZeroDivisionError, match="by the task") as caught:
        envs.step(["a", "raise", "a"])
    assert "in slot 1" in caught.value.__notes__[0]
    observations, *_ = envs.step("a")  # NEXT_STEP resets the slot that failed
    assert (observations[0], observations[2]) == ("turn 2", "turn 2")
    assert observations[1].startswith("start")


def test_a_reset_forgets_the_error_of_the_episode_before() -> None:
    envs = countdowns((3, 3))
    envs.reset(seed=0)
    envs.send(["raise", "fine"])
    envs.reset(seed=0)
    assert list(envs.step("a")[1]) == [1.0, 1.0]


def test_recv_keeps_the_results_of_other_slots_when_one_raises() -> None:
    envs = countdowns((3, 3))
    envs.reset(seed=0)
    envs.send(["raise", "fine"])
    with pytest.raises(ZeroDivisionError):
        envs.recv(2)
    slots, *_, infos = envs.recv()
    assert (list(slots), list(infos["said"])) == ([1], ["fine"])


def test_an_aborted_request_is_an_error_and_no_answer(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x" * 100, delay=0.01)
    envs = bound(engine, (3, 3))
    envs.reset(seed=0)
    envs.send(rlenv.Sample())
    engine.pause_sync("abort")
    with pytest.raises(rlenv.AbortedError):
        envs.recv(2)


def test_a_prompt_that_does_not_fit_truncates_its_slot_alone(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x", max_model_len=120)
    envs = bound(engine, (3, 3))
    envs.reset(seed=0)
    envs.reset(options={"reset_mask": np.array([True, False]), "hint": "h" * 200})
    _, rewards, _, truncations, infos = envs.step(rlenv.Sample())
    assert list(truncations) == [True, False]
    assert list(rewards) == [0.0, 1.0]
    assert list(infos["failure"]) == ["prompt_too_long", None]


def test_samples_without_an_engine_are_refused() -> None:
    envs = countdowns((1,))
    envs.reset(seed=0)
    with pytest.raises(rlenv.ConfigError, match=r"make_vec\(\.\.\., engine="):
        envs.step(rlenv.Sample())


def test_actions_must_be_one_for_each_slot() -> None:
    envs = countdowns((1, 1))
    envs.reset(seed=0)
    with pytest.raises(rlenv.ConfigError, match="3 actions for 2 slots"):
        envs.step(["a", "b", "c"])


def test_closing_twice_in_mid_step_is_closing_once(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x", delay=30.0)
    envs = bound(engine, (1, 1))
    envs.reset(seed=0)
    envs.send(rlenv.Sample())
    envs.close()
    envs.close()
    assert engine.in_flight == 0
    with pytest.raises(ClosedEnvironmentError):
        envs.step("x")


def test_attributes_and_calls_reach_every_environment() -> None:
    envs = countdowns((1, 2))
    assert envs.get_attr("length") == (1, 2)
    assert envs.call("reset", seed=3)[0] == envs.call("reset", seed=3)[1]


def test_numbers_of_one_key_are_promoted_and_mixed_values_stay_what_they_are() -> None:
    infos = batch_infos({0: {"score": 1, "answer": 4, "sub": {"a": 1}}, 2: {"score": 0.5, "answer": "four"}}, 3)
    assert infos["score"].tolist() == [1.0, 0.0, 0.5]
    assert infos["_score"].tolist() == [True, False, True]
    assert infos["answer"].tolist() == [4, None, "four"]
    assert infos["sub"]["a"].tolist() == [1, 0, 0]
    assert infos["_sub"].tolist() == [True, False, False]


def test_a_large_batch_of_cheap_steps_takes_no_time_per_slot_squared() -> None:
    envs = countdowns((10**6,) * 1024)
    envs.reset(seed=0)
    began = time.perf_counter()
    envs.step("a")
    assert time.perf_counter() - began < 1.0
