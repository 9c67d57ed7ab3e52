import math

import pytest
import torch

from rlenv.agents.corrections import RatioTable, buckets, tis_weights, truncated_ratio


def test_the_truncated_ratio_keeps_the_gradient_of_its_value() -> None:
    log_ratio = torch.tensor([math.log(0.5), math.log(1.5), math.log(4.0)], requires_grad=True)
    ratio = truncated_ratio(log_ratio, cap=2.0)
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert log_ratio.grad.tolist() == pytest.approx([0.5, 1.5, 2.0])


@pytest.mark.parametrize("cap", [2.0, math.inf])
def test_huge_log_ratios_stay_finite(cap: float) -> None:
    log_ratio = torch.tensor([200.0, 60.0, -80.0], requires_grad=True)
    ratio = truncated_ratio(log_ratio, cap)
    ratio.sum().backward()
    assert torch.isfinite(ratio).all() and torch.isfinite(log_ratio.grad).all()
    assert ratio[2] < 1e-8


def test_only_stale_tokens_are_weighted() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = old.detach() - torch.tensor([0.1, 0.1, 5.0])
    weights = tis_weights(old, behaviour, torch.tensor([False, True, True]), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(0.1), 2.0])
    assert not weights.requires_grad


def test_tokens_are_sorted_by_staleness_and_stale_context() -> None:
    index = buckets(torch.tensor([0, 1, 3, 9, 0, 2]), torch.tensor([False, False, False, False, True, True]))
    assert index.tolist() == [0, 1, 3, 4, 5, 2]


def test_statistics_have_the_values_of_a_calculation_by_hand() -> None:
    table = RatioTable(torch.device("cpu"))
    bucket = torch.tensor([0, 0, 1, 1])
    log_ratio = torch.tensor([0.0, 0.0, math.log(2.0), math.log(0.5)])
    table.add(bucket, log_ratio, torch.tensor([False, False, True, False]), torch.tensor([1.0, 1.0, 1.0, 3.0]))
    stale = table.of("1", "2")
    assert stale.tokens == 2
    assert stale.ratio_mean == pytest.approx(1.25)
    # k3: (2 - 1 - ln 2 + 0.5 - 1 + ln 2) / 2
    assert stale.kl == pytest.approx(0.25)
    # (2 + 0.5)² / (2 (4 + 0.25))
    assert stale.ess == pytest.approx(6.25 / 8.5)
    assert stale.abs_mean == stale.abs_max == pytest.approx(math.log(2))
    assert stale.clip_fraction == 0.5
    assert table.of("0").ess == 1.0 and table.of("0").kl == 0.0
    assert set(table.by_staleness()) == {"0", "1"}
    assert table.of("2") is None
    assert table.entropy() == pytest.approx(1.5)


def test_statistics_of_extreme_ratios_are_finite() -> None:
    table = RatioTable(torch.device("cpu"))
    flat = torch.zeros(2)
    table.add(torch.tensor([1, 1]), torch.tensor([200.0, -200.0]), flat.bool(), flat)
    stats = table.of("1")
    assert math.isfinite(stats.kl) and stats.ess == pytest.approx(0.5)
    assert stats.abs_max == 200.0
