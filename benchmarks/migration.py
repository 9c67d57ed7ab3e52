"""From a naive backend to a right one, fix by fix: does training follow the reference again?

    python -m benchmarks.migration --seeds 0 1 2 --out migration.json --plot migration.png

The reference trains on-policy: it alternates rollouts and updates, so that its loss never reads the engine's log-probs.
All others train asynchronously, two versions stale at most, where it does. The naive backend is refused by the audit
before training, and trained with --force to see what the audit spares one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rlenv.agents.config import TrainConfig
from rlenv.agents.display import display_for
from rlenv.agents.hardware import hardware, versions
from rlenv.agents.learner_types import Scoring
from rlenv.agents.parts import open_parts
from rlenv.agents.run import OpenParts, Run
from rlenv.engine.backend import Backend
from rlenv.errors import AuditError

TEMPERATURE = 0.6
EVALUATIONS = 3  # the last ones, whose mean is compared
CLOSE = 0.03


@dataclass(frozen=True)
class Stage:
    """One backend on the way, and what of `TrainConfig` differs."""

    name: str
    backend: Backend = field(default_factory=Backend)
    scoring: Scoring = field(default_factory=Scoring)
    settings: dict[str, Any] = field(default_factory=dict)


_NAIVE = Backend(logprobs="raw", head="bfloat16", salted=False, proof=False)
STAGES = (
    Stage("reference", settings={"mode": "sync"}),
    Stage("naive", _NAIVE, settings={"clear_cache": False}),
    Stage("+ processed log-probs", replace(_NAIVE, logprobs="processed"), settings={"clear_cache": False}),
    Stage("+ caches cleared at a swap", replace(_NAIVE, logprobs="processed", salted=True)),
    Stage("+ fp32 output head, proof: right"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.migration", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--out", help="where the JSON goes")
    parser.add_argument("--plot", help="where the PNG goes")
    arguments = parser.parse_args(argv)
    usual = TrainConfig(
        "math-v0", steps=arguments.steps, lr=arguments.lr, temperature=arguments.temperature, eval_problems=256,
        eval_every=arguments.eval_every,
    )  # fmt: skip
    refused = refusal(usual)
    print(f"the naive backend is refused: {refused}")
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "plot")}
    result: dict[str, Any] = {
        "settings": settings,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "refused": refused,
    }
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for stage in STAGES:
            rows.append(train(stage, replace(usual, seed=seed, **stage.settings)))
            print(line(rows[-1]), flush=True)
        # half an hour of training is not to be lost: what is there after each seed is written
        result |= {**verdict(rows), "rows": rows}
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
        if arguments.plot:
            plot(rows, arguments.plot)
    print(f"{'PASS' if result['passed'] else 'FAIL'}: gap to the reference {result['gap_to_reference']}")
    return 0 if result["passed"] else 1


def refusal(config: TrainConfig) -> str:
    """Why the naive backend does not start to train, unless it is forced."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(replace(config, run_dir=f"{folder}/run"), display_for(config.steps), parts_of(STAGES[1]))
        try:
            asyncio.run(run())
        except AuditError as error:
            return str(error)
    raise AssertionError("the audit let a naive backend pass")


def parts_of(stage: Stage) -> OpenParts:
    return functools.partial(open_parts, backend=stage.backend, scoring=stage.scoring)


def train(stage: Stage, config: TrainConfig) -> dict[str, Any]:
    """Train whatever the audit says; its causes, the evaluations and the curves come out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(replace(config, run_dir=f"{folder}/run", force=True), display_for(config.steps), parts_of(stage))
        result = asyncio.run(run())
        metrics = [json.loads(text) for text in (result.folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = result.summary["evaluations"]
    return {
        "stage": stage.name,
        "seed": config.seed,
        "audit": result.summary["audit"],
        "collapse_warnings": result.summary["collapse_warnings"],
        "eval_before": result.summary["eval_before"],
        "evaluations": evaluations,
        "accuracy": mean(row["accuracy"] for row in evaluations[-EVALUATIONS:]),
        "curve": [_point(row) for row in metrics],
    }


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over seeds, how far each stage's last evaluations are from the reference's; the last one must be close."""
    accuracy = {stage.name: [row["accuracy"] for row in rows if row["stage"] == stage.name] for stage in STAGES}
    means = {name: mean(values) for name, values in accuracy.items()}
    gaps = {name: round(value - means["reference"], 4) for name, value in means.items()}
    audits = {stage.name: [row["audit"]["passed"] for row in rows if row["stage"] == stage.name] for stage in STAGES}
    right = STAGES[-1].name
    return {
        "accuracy": accuracy,
        "gap_to_reference": gaps,
        "audit_passed": audits,
        "passed": abs(gaps[right]) <= CLOSE and all(audits[right]) and not any(audits["naive"]),
    }


def line(row: dict[str, Any]) -> str:
    blamed = ", ".join(cause["name"] for cause in row["audit"]["causes"])
    why = f"  audit: {blamed}" if blamed else ""
    return f"seed {row['seed']}  {row['stage']:28s} {row['eval_before']:.3f} → {row['accuracy']:.3f}{why}"


def _point(row: dict[str, Any]) -> dict[str, Any]:
    """One step: means over all its tokens, and each part of the log-ratio by where it comes from."""
    by_staleness = row["learner"]["by_staleness"]
    tokens = sum(stats["tokens"] for stats in by_staleness.values())

    def overall(name: str) -> float:
        return sum(stats[name] * stats["tokens"] for stats in by_staleness.values()) / tokens

    parts = {
        "numerics": by_staleness.get("0"),
        "staleness": _joined([by_staleness[name] for name in ("1", "2", "3", "4+") if name in by_staleness]),
        "stale keys and values": by_staleness.get("stale_context"),
    }
    return {
        "step": row["step"],
        "reward": row["reward"],
        "ratio": overall("ratio_mean"),
        "kl": overall("kl"),
        "clip_fraction": overall("clip_fraction"),
        "entropy": row["learner"]["entropy"],
        "kl_of": {name: stats and stats["kl"] for name, stats in parts.items()},
    }


def _joined(stats: Sequence[dict[str, float]]) -> dict[str, float] | None:
    tokens = sum(row["tokens"] for row in stats)
    return {"kl": sum(row["kl"] * row["tokens"] for row in stats) / tokens} if tokens else None


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Means over seeds: accuracy and reward against the reference, then what the ratios show."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 3)
    names = [stage.name for stage in STAGES]
    titles = {
        "accuracy": "Held-out accuracy", "ratio": "Mean ratio, learner / engine", "kl": "k3 KL (nats)",
        "clip_fraction": "Clip fraction", "entropy": "Entropy (nats)",
    }  # fmt: skip
    for axis, (key, title) in zip(axes.flat, titles.items(), strict=False):
        for name in names:
            curves = [_curve(row, key) for row in rows if row["stage"] == name]
            steps = [point[0] for point in curves[0]]
            values = [mean(point[1] for point in points) for points in zip(*curves, strict=True)]
            axis.plot(steps, values, label=name, color="black" if name == "reference" else None)
        axis.set(title=title, xlabel="step", yscale="log" if key == "kl" else "linear")
        axis.grid(alpha=0.25)
    axes.flat[0].legend(fontsize=8)
    _bars(axes.flat[5], rows, names)
    figure.savefig(path, dpi=100)


def _curve(row: dict[str, Any], key: str) -> list[tuple[int, float]]:
    if key == "accuracy":
        return [(point["step"], point["accuracy"]) for point in row["evaluations"]]
    return [(point["step"], point[key]) for point in row["curve"]]


def _bars(axis: Any, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    parts = ("numerics", "staleness", "stale keys and values")
    for place, part in enumerate(parts):
        heights = []
        for name in names:
            values = [
                p["kl_of"][part] for row in rows if row["stage"] == name for p in row["curve"] if p["kl_of"][part]
            ]
            heights.append(mean(values) if values else 0.0)
        axis.barh([number + 0.27 * place for number in range(len(names))], heights, height=0.25, label=part)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(title="k3 KL by origin (nats)", xscale="log")
    axis.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
