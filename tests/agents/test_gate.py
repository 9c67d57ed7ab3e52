"""The audit before training: what passes, what is refused and why, and what a forced run is told."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeLearner

from rlenv.agents.collapse import signs_of_collapse
from rlenv.agents.config import TrainConfig
from rlenv.agents.display import LineDisplay
from rlenv.agents.learner_types import RatioStats, StepMetrics
from rlenv.agents.packing import Batch
from rlenv.agents.run import Run
from rlenv.agents.run_folder import read_metrics
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import AuditError, CollapseError

Start = Callable[..., ScriptedEngine]
HEALTHY = RatioStats(500, ratio_mean=1.001, kl=0.004, ess=0.99, abs_mean=0.01, abs_max=0.2, clip_fraction=0.0)
COLLAPSED = RatioStats(500, ratio_mean=1.3, kl=0.4, ess=0.5, abs_mean=0.5, abs_max=3.0, clip_fraction=0.6)


class Collapsing(FakeLearner):
    """Its second update finds its stale tokens far from where they were sampled."""

    async def step(self, batch: Batch) -> StepMetrics:
        metrics = await super().step(batch)
        stats = COLLAPSED if len(self.batches) == 2 else HEALTHY
        return replace(metrics, by_staleness={"0": HEALTHY, "1": stats})


def run_of(engine: ScriptedEngine, learner: FakeLearner, folder: Path, out: io.StringIO, **settings: object) -> Run:
    @contextlib.asynccontextmanager
    async def parts(config: TrainConfig) -> AsyncIterator[tuple[ScriptedEngine, FakeLearner]]:
        yield engine, learner

    small = {"steps": 3, "groups_per_step": 2, "group_size": 4, "eval_problems": 0}
    config = TrainConfig(**{"task": "math-v0", "run_dir": str(folder), **small, **settings})
    return Run(config, LineDisplay(config.steps, out), parts)


def test_a_backend_that_agrees_passes_and_the_summary_says_by_how_much(scripted: Start, tmp_path: Path) -> None:
    out = io.StringIO()
    result = asyncio.run(run_of(scripted(lambda p, s: "7" * 40), FakeLearner(), tmp_path / "run", out)())
    assert result.summary["audit"]["passed"] is True and result.summary["audit"]["forced"] is False
    assert result.summary["audit"]["tokens"] >= 512 and result.summary["audit"]["abs_max"] == 0
    assert "audit passed: max |Δ| 0.0e+00 nats" in out.getvalue()


def test_one_that_does_not_is_refused_before_any_update(scripted: Start, tmp_path: Path) -> None:
    learner = FakeLearner()
    learner.off = 0.3
    with pytest.raises(AuditError, match=r"do not agree at equal weights\. unexplained: .* type --force"):
        asyncio.run(run_of(scripted(lambda p, s: "7" * 40), learner, tmp_path / "run", io.StringIO())())
    assert not learner.batches
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_unless_it_is_forced_which_the_summary_keeps(scripted: Start, tmp_path: Path) -> None:
    learner, out = FakeLearner(), io.StringIO()
    learner.off = 0.3
    summary = asyncio.run(run_of(scripted(lambda p, s: "7" * 40), learner, tmp_path / "run", out, force=True)()).summary
    assert summary["updates"] == 3
    assert (summary["audit"]["passed"], summary["audit"]["forced"]) == (False, True)
    assert summary["audit"]["abs_mean"] == pytest.approx(0.3) and summary["audit"]["causes"][0]["name"] == "unexplained"
    assert "audit FAILED, and training is forced" in out.getvalue()


def test_a_collapse_is_told_counted_and_kept(scripted: Start, tmp_path: Path) -> None:
    out = io.StringIO()
    summary = asyncio.run(run_of(scripted(lambda p, s: "7" * 40), Collapsing(), tmp_path / "run", out)()).summary
    assert summary["updates"] == 3 and summary["collapse_warnings"] == 1
    sign = "staleness 1: k3 KL 0.4 nats (limit 0.1), effective sample size 0.50 (limit 0.8), mean ratio 1.30"
    assert f"step 2: sampling and learning part ways: {sign}" in out.getvalue()
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [len(row["collapse"]) for row in rows] == [0, 1, 0]


def test_a_run_can_be_told_to_stop_at_a_collapse(scripted: Start, tmp_path: Path) -> None:
    learner = Collapsing()
    run = run_of(scripted(lambda p, s: "7" * 40), learner, tmp_path / "run", io.StringIO(), on_collapse="stop")
    with pytest.raises(CollapseError, match=r"staleness 1: k3 KL 0\.4"):
        asyncio.run(run())
    assert len(learner.batches) == 2


@pytest.mark.parametrize("field", ["kl", "ess", "ratio_mean"])
def test_figures_that_are_no_numbers_are_signs_too(field: str) -> None:
    metrics = StepMetrics(1, 0.0, 0.0, 0.0, 1, 1, 0.0, 0.0, 0.0, None, None, {"0": HEALTHY}, 0.0)
    assert signs_of_collapse(metrics) == []
    broken = replace(metrics, by_staleness={"0": replace(HEALTHY, **{field: float("nan")})})
    assert len(signs_of_collapse(broken)) == 1
    few = replace(metrics, by_staleness={"0": replace(COLLAPSED, tokens=20)})
    assert signs_of_collapse(few) == []
