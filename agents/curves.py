"""The rows of a run's metrics go in, one picture comes out: learning, length, staleness, mismatch."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlenv.agents.run_folder import write_atomically


def draw_curves(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], path: Path) -> None:
    """Draw `rows` (lines of metrics.jsonl) and the evaluations of `summary` to a PNG at `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(_title(summary))
    axes = figure.subplots(2, 2)
    (learning, length), (staleness, mismatch) = axes
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
    steps = [row["step"] for row in rows]

    learning.plot(steps, [row["reward"] for row in rows], label="reward of the training batch")
    _mark_evaluations(learning, summary, ("eval_before", "eval_after"), steps, "held-out, temperature 1", "o")
    during = summary.get("evaluations", [])
    learning.plot([row["step"] for row in during], [row["accuracy"] for row in during], "o", color="tab:orange")
    _mark_evaluations(learning, summary, ("eval_before_greedy", "eval_after_greedy"), steps, "held-out, greedy", "^")
    learning.set(title="Reward", xlabel="step")
    learning.legend(loc="lower right")

    length.plot(steps, [row["length"] for row in rows], label="sampled tokens of the training batch")
    _mark_evaluations(
        length, summary, ("eval_before_length", "eval_after_length"), steps, "held-out, temperature 1", "o"
    )
    length.set(title="Response length", xlabel="step")
    length.legend(loc="lower right")

    staleness.plot(steps, [row["staleness_max"] for row in rows], label="oldest token", drawstyle="steps-mid")
    staleness.plot(steps, [row["staleness_mean"] for row in rows], label="mean of trajectories")
    staleness.axhline(summary.get("staleness_bound", 0), color="grey", linestyle="--", label="bound")
    staleness.yaxis.get_major_locator().set_params(integer=True)
    staleness.set(title="Staleness at consumption (versions)", xlabel="step")
    staleness.legend(loc="lower right")

    mismatch.plot(steps, [row["mismatch_max"] for row in rows], label="max")
    mismatch.plot(steps, [row["mismatch_mean"] for row in rows], label="mean")
    if any(row["mismatch_max"] for row in rows):
        mismatch.set_yscale("log")
    mismatch.set(title="Backend mismatch on canary tokens (nats)", xlabel="step")
    mismatch.legend(loc="center right")

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    write_atomically(path, png.getvalue())


def _mark_evaluations(
    axis: Any, summary: Mapping[str, Any], names: Sequence[str], steps: Sequence[int], label: str, marker: str
) -> None:
    ends = (0, steps[-1] if steps else 0)
    points = [(x, summary[name]) for x, name in zip(ends, names, strict=True) if summary.get(name) is not None]
    if points:
        values = " → ".join(f"{value:.2f}" for _, value in points)
        axis.plot(*zip(*points, strict=True), linestyle="none", marker=marker, markersize=8, label=f"{label}: {values}")


def _title(summary: Mapping[str, Any]) -> str:
    control = ", rewards shuffled" if summary.get("shuffle_rewards") else ""
    return f"{summary.get('task', '')}: {summary.get('updates', 0)} updates, {summary.get('mode', '')}{control}"
