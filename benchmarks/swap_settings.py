"""Which way of swapping weights trains best: one learning curve for each pause mode, with and without a cleared cache.

    python -m benchmarks.swap_settings --steps 30 --out swap_settings.json --plot swap_settings.png

Every run is the demo's, with the same seed and data; only the setting differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rlenv.agents.config import TrainConfig
from rlenv.agents.display import display_for
from rlenv.agents.hardware import hardware, versions
from rlenv.agents.parts import open_parts
from rlenv.agents.run import Run
from rlenv.engine.base import PauseMode

KEPT_KEYS = (
    "eval_before", "eval_after", "eval_after_greedy", "train_s", "tokens", "rollouts", "failures", "tokens_per_s",
    "stall_per_update_s", "engine_idle", "learner_idle", "weight_updates_mid_generation", "mismatch_max_abs",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.swap_settings", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="where the JSON goes")
    parser.add_argument("--plot", help="where the PNG goes")
    arguments = parser.parse_args(argv)
    rows = [train(p, c, arguments.steps, arguments.seed) for p in get_args(PauseMode) for c in (True, False)]
    result = {"rows": rows, "hardware": hardware("cpu"), "versions": versions(), "seed": arguments.seed}
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    print("| pause | cache | accuracy before → after | seconds | stall an update | tokens/s | failed rollouts |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['pause']} | {row['cache']} | {row['eval_before']:.3f} → {row['eval_after']:.3f} "
              f"| {row['train_s']:.0f} | {row['stall_per_update_s'] * 1e3:.0f} ms | {row['tokens_per_s']:.0f} "
              f"| {sum(row['failures'].values())} of {row['rollouts']} |")  # fmt: skip
    return 0


def train(pause: PauseMode, clear_cache: bool, steps: int, seed: int) -> dict[str, Any]:
    """One run of the demo's settings; its summary and its curve."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig("math-v0", steps=steps, seed=seed, pause=pause, clear_cache=clear_cache, run_dir=folder)
        result = asyncio.run(Run(config, display_for(steps), open_parts)())
        metrics = [json.loads(line) for line in (Path(result.folder) / "metrics.jsonl").read_text().splitlines()]
    kept = {key: result.summary[key] for key in KEPT_KEYS}
    curve = [{"step": row["step"], "reward": row["reward"], "wall_s": row["wall_s"]} for row in metrics]
    return {"pause": pause, "cache": "cleared" if clear_cache else "kept", **kept, "curve": curve}


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Reward by step and by second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for row in rows:
        style = {"label": f"{row['pause']}, cache {row['cache']}", "ls": "-" if row["cache"] == "cleared" else "--"}
        rewards = [point["reward"] for point in row["curve"]]
        axes[0].plot([point["step"] for point in row["curve"]], rewards, **style)
        axes[1].plot([point["wall_s"] for point in row["curve"]], rewards, **style)
    axes[0].set(xlabel="update", ylabel="mean reward of the batch")
    axes[1].set(xlabel="seconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
