"""What happens during a run goes in; one metrics row a step and the figures of the summary come out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlenv.agents.advantages import are_equal
from rlenv.agents.collapse import signs_of_collapse
from rlenv.agents.learner_types import StepMetrics
from rlenv.engine.base import UpdateReport
from rlenv.types import Group


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step and the weight update after it: a line of `metrics.jsonl`.

    `reward` and `length` (sampled ids) are means over the batch's trajectories. Staleness is in versions, the mean
    over trajectories by their oldest id. `constant_groups` had equal rewards and carry no signal. `mismatch_*` are
    nats, engine against learner on canary ids at this very version. Times are seconds: `wait_s` the learner waited
    for rollouts, `learn_s` it computed, `update_s` the weights were on their way and proven, of which the engine
    stood still for `stall_s`. `collapse` has a sentence for each staleness bucket whose ratios are out of bounds.
    `tokens_per_s` and `failures` (by cause) cover all rollouts since the row before.
    """

    step: int
    wall_s: float
    reward: float
    length: float
    staleness_mean: float
    staleness_max: int
    constant_groups: int
    mismatch_mean: float
    mismatch_max: float
    in_flight: int
    tokens_per_s: float
    failures: dict[str, int]
    dropped: dict[str, int]
    wait_s: float
    learn_s: float
    update_s: float
    stall_s: float
    learner: dict[str, Any]
    collapse: tuple[str, ...] = ()


class Tally:
    """The accounts of one run. Figures cover the training loop alone, not start-up or evaluation."""

    def __init__(self) -> None:
        self.steps = 0
        self.weight_updates = 0
        self.mid_generation = 0
        self.canary_failures = 0
        self.engine_restarts = 0
        self.groups = 0  # that were trained on
        self.constant_groups = 0  # of them, whose rewards were all equal
        self.collapse_warnings = 0
        self.staleness_max = 0
        self.mismatch_max = 0.0
        self.tokens = 0
        self.rollouts = 0
        self.failures: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.wait_s = 0.0
        self.stall_s = 0.0
        self.engine_idle_s = 0.0
        self._began = self._row_began = time.perf_counter()
        self._ended: float | None = None
        self._row_tokens = 0
        self._row_failures: Counter[str] = Counter()

    @property
    def wall_s(self) -> float:
        return (self._ended or time.perf_counter()) - self._began

    def begin(self) -> None:
        """The loop starts now."""
        self._began = self._row_began = time.perf_counter()

    def end(self) -> None:
        """The loop is over: later reads see the clock as it stands now."""
        self._ended = time.perf_counter()

    def add_rollouts(self, group: Group) -> None:
        """A group came back, whatever becomes of it."""
        sampled = sum(sum(row.loss_mask) for row in group.trajectories)
        causes = Counter(failure.cause for failure in group.failures)
        self.rollouts += len(group.trajectories) + len(group.failures)
        self.tokens += sampled
        self._row_tokens += sampled
        self.failures += causes
        self._row_failures += causes

    def add_restart(self, report: UpdateReport) -> None:
        """The engine had died and serves again."""
        self.engine_restarts += 1
        self.canary_failures += report.refuted
        self.mismatch_max = max(self.mismatch_max, report.mismatch_max)

    def add_step(
        self,
        groups: Sequence[Group],
        metrics: StepMetrics,
        report: UpdateReport,
        *,
        dropped: Counter[str],
        wait_s: float,
        learn_s: float,
        update_s: float,
    ) -> StepRow:
        """The weights of version `report.version` came from these groups; closes a row."""
        rows = [row for group in groups for row in group.trajectories]
        lags = [report.version - 1 - row.oldest_version for row in rows]
        constant = sum(are_equal([row.reward for row in group.trajectories]) for group in groups)
        now = time.perf_counter()
        row = StepRow(
            step=self.steps + 1,
            wall_s=now - self._began,
            reward=sum(row.reward for row in rows) / len(rows),
            length=sum(sum(row.loss_mask) for row in rows) / len(rows),
            staleness_mean=sum(lags) / len(lags),
            staleness_max=max(lags),
            constant_groups=constant,
            mismatch_mean=report.mismatch_mean,
            mismatch_max=report.mismatch_max,
            in_flight=report.in_flight,
            tokens_per_s=self._row_tokens / (now - self._row_began),
            failures=dict(self._row_failures),
            dropped=dict(dropped - self.dropped),
            wait_s=wait_s,
            learn_s=learn_s,
            update_s=update_s,
            stall_s=report.stall_s,
            learner=asdict(metrics),
            collapse=tuple(signs_of_collapse(metrics)),
        )
        self.groups += len(groups)
        self._close_row(row, report, dropped, now)
        return row

    def summary(self) -> dict[str, Any]:
        """The loop's part of `summary.json`; shares are of wall time."""
        wall = max(self.wall_s, 1e-9)
        return {
            "updates": self.steps,
            "weight_updates": self.weight_updates,
            "weight_updates_mid_generation": self.mid_generation,
            "staleness_max": self.staleness_max,
            "mismatch_max_abs": self.mismatch_max,
            "canary_failures": self.canary_failures,
            "engine_restarts": self.engine_restarts,
            "constant_groups": self.constant_groups,
            "collapse_warnings": self.collapse_warnings,
            "rollouts": self.rollouts,
            "failures": dict(self.failures),
            "dropped_stale": self.dropped["stale"],
            "dropped_unproven": self.dropped["unproven"],
            "dropped_too_few_survivors": self.dropped["too few survivors"],
            "dropped_constant": self.dropped["constant"],
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / wall,
            "learner_idle": self.wait_s / wall,
            "engine_idle": self.engine_idle_s / wall,
            "stall_per_update_s": self.stall_s / max(self.weight_updates, 1),
            "train_s": self.wall_s,
        }

    def _close_row(self, row: StepRow, report: UpdateReport, dropped: Counter[str], now: float) -> None:
        self.steps += 1
        self.weight_updates += 1
        self.mid_generation += report.in_flight > 0
        self.canary_failures += report.refuted
        self.constant_groups += row.constant_groups
        self.collapse_warnings += len(row.collapse)
        self.staleness_max = max(self.staleness_max, row.staleness_max)
        self.mismatch_max = max(self.mismatch_max, report.mismatch_max)
        self.wait_s += row.wait_s
        self.stall_s += row.stall_s
        self.dropped = Counter(dropped)
        self._row_began, self._row_tokens, self._row_failures = now, 0, Counter()
