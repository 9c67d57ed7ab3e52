import math

import pytest
import torch

from rlenv.agents.learner_types import LossConfig
from rlenv.agents.losses import multi_step_loss, one_step_loss
from rlenv.errors import ConfigError

CONFIG = LossConfig(clip_low=0.2, clip_high=0.3, weight_cap=2.0)


def log(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios).log()


def gradients(loss: torch.Tensor, current: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss, current)[0].tolist()


def test_one_step_loss_clips_the_ratio_to_behaviour_on_stale_tokens() -> None:
    ratios = (1.1, 1.5, 0.7, 0.7, 1.5, 5.0)
    advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    behaviour = torch.full((6,), -3.0)
    current = (behaviour + log(*ratios)).requires_grad_()
    losses = one_step_loss(current, behaviour, advantages, torch.ones(6, dtype=torch.bool), CONFIG)
    # Past the range along the advantage: no gradient. Past it against the advantage: the ratio, at most the cap.
    assert losses.clipped.tolist() == [False, True, False, True, False, False]
    assert losses.total.item() == pytest.approx(-2.2 - 2.6 - 1.4 + 1.6 + 3.0 + 4.0, rel=1e-5)
    assert gradients(losses.total, current) == pytest.approx([-2.2, 0.0, -1.4, 0.0, 3.0, 4.0], rel=1e-5)


def test_one_step_loss_leaves_fresh_tokens_uncorrected() -> None:
    behaviour = torch.tensor([-3.0, -3.0])
    current = (behaviour + log(1.5, 0.1)).requires_grad_()
    losses = one_step_loss(current, behaviour, torch.tensor([2.0, -2.0]), torch.zeros(2, dtype=torch.bool), CONFIG)
    assert not losses.clipped.any()
    assert gradients(losses.total, current) == pytest.approx([-2.0, 2.0])


def test_multi_step_loss_clips_current_against_old_and_weighs_stale_tokens() -> None:
    old = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    behaviour = old - log(1.5, 1.5, 4.0, 1.5)
    stale = torch.tensor([False, True, True, True])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0])
    current = (old + log(1.1, 1.1, 1.1, 1.4)).requires_grad_()
    losses = multi_step_loss(current, old, behaviour, advantages, stale, CONFIG)
    assert losses.clipped.tolist() == [False, False, False, True]
    assert losses.total.item() == pytest.approx(-1.1 - 1.5 * 1.1 + 2.0 * 1.1 - 1.5 * 1.3, rel=1e-5)
    assert gradients(losses.total, current) == pytest.approx([-1.1, -1.65, 2.2, 0.0], rel=1e-5)


def test_first_of_several_steps_has_the_policy_gradient_times_the_weights() -> None:
    old = torch.tensor([-2.0, -2.0])
    behaviour = old - log(1.5, 1.5)
    current = old.clone().requires_grad_()
    losses = multi_step_loss(current, old, behaviour, torch.ones(2), torch.tensor([False, True]), CONFIG)
    assert gradients(losses.total, current) == pytest.approx([-1.0, -1.5])


def test_advantages_of_zero_give_no_gradient() -> None:
    behaviour = torch.tensor([-3.0, -3.0])
    current = (behaviour + log(5.0, 1.0)).requires_grad_()
    losses = one_step_loss(current, behaviour, torch.zeros(2), torch.tensor([True, False]), CONFIG)
    assert losses.total.item() == 0.0 and not losses.clipped.any()
    assert gradients(losses.total, current) == [0.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("config", [CONFIG, LossConfig(math.inf, math.inf, math.inf)])
def test_extreme_log_ratios_leave_loss_and_gradients_finite(advantage: float, config: LossConfig) -> None:
    behaviour = torch.tensor([-60.1, -0.1])
    current = torch.tensor([-0.1, -80.1], requires_grad=True)
    advantages, stale = torch.full((2,), advantage), torch.ones(2, dtype=torch.bool)
    for losses in (
        one_step_loss(current, behaviour, advantages, stale, config),
        multi_step_loss(current, behaviour, behaviour, advantages, stale, config),
        multi_step_loss(current, current.detach(), behaviour, advantages, stale, config),
    ):
        assert math.isfinite(losses.total.item())
        assert all(map(math.isfinite, gradients(losses.total, current)))


def test_bounds_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="clip_low"):
        LossConfig(clip_low=0.0)
    with pytest.raises(ConfigError, match="weight_cap"):
        LossConfig(weight_cap=0.5)
