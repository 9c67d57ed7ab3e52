"""The events of a run go in; a run folder that tells of it, at every moment, comes out."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlenv.agents.config import TrainConfig
from rlenv.agents.curves import draw_curves
from rlenv.agents.evaluate import Evaluation
from rlenv.agents.run_folder import RunFolder, read_metrics
from rlenv.agents.tally import StepRow


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a finished run lies, and its `summary.json`."""

    folder: Path
    summary: dict[str, Any]

    @property
    def model(self) -> Path:
        """The trained model's folder, for transformers or for another run."""
        return self.folder / "model"


class Report:
    """Keeps `summary.json`, `metrics.jsonl` and `curves.png` of one run; a context manager around all of it.

    An error that leaves the context is written down as `status` "interrupted" or "failed", and goes on.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.folder = RunFolder(config.run_dir, config.to_dict())
        self._began = time.perf_counter()
        self._summary: dict[str, Any] = {
            "status": "starting",
            "task": config.task,
            "model": config.model,
            "mode": config.mode,
            "seed": config.seed,
            "shuffle_rewards": config.shuffle_rewards,
            "staleness_bound": config.staleness_bound,
        }
        self.update({})

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._began

    def update(self, figures: Mapping[str, Any]) -> None:
        """Figures that hold from now on."""
        self._summary |= {**figures, "wall_s": self.wall_s}
        self.folder.write_summary(self._summary)

    def step(self, row: StepRow, figures: Mapping[str, Any]) -> None:
        self.folder.add_metrics(asdict(row))
        self.update(figures)

    def evaluation(self, when: str, sampled: Evaluation, greedy: Evaluation) -> None:
        """Held-out figures `"before"` or `"after"` training, at temperature 1 and greedily."""
        self.update(
            {
                f"eval_{when}": sampled.accuracy,
                f"eval_{when}_length": sampled.length,
                f"eval_{when}_greedy": greedy.accuracy,
                f"eval_{when}_greedy_length": greedy.length,
                "eval_problems": sampled.problems,
            }
        )

    def evaluation_at(self, step: int, sampled: Evaluation) -> None:
        """Held-out figures at temperature 1 after `step`, during training: one more of `evaluations`."""
        row = {"step": step, "accuracy": sampled.accuracy, "length": sampled.length}
        self.update({"evaluations": [*self._summary.get("evaluations", []), row]})

    def done(self) -> RunResult:
        self.update({"status": "done"})
        return RunResult(self.folder.path, dict(self._summary))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._ended_by(error)
            draw_curves(read_metrics(self.folder.metrics), self._summary, self.folder.path / "curves.png")
        finally:
            self.folder.close()

    def _ended_by(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt) or _is_cancelled():
            self.update({"status": "interrupted"})
            return
        self.folder.write_error("".join(traceback.format_exception(error)))
        error.add_note(f"traceback: {self.folder.error}")
        self.update({"status": "failed", "error": f"{type(error).__name__}: {error}"})


def _is_cancelled() -> bool:
    """Whether this task was asked to end: what it raises on the way is then no failure of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
