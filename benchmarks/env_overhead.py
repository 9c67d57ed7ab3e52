"""The same cheap text task goes into each vector environment, interleaved; env-steps per second come out.

    python -m benchmarks.env_overhead --out benchmarks/results/env_overhead.json

What is timed is the machinery, not the task: 32 environments, four turns an episode, one `step` of all at a time.
Beside Gymnasium's vectors stand gem-llm and skyrl-gym, if they can be imported (`pip install gem-llm skyrl-gym`);
skyrl-gym has no vector environment and is stepped in a loop, reset when done. Ratios pair the rounds; the lower
bound is the 2.5 % quantile of the bootstrapped median.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import io
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import rlenv
from rlenv.agents.hardware import hardware

ENVS, TURNS = 32, 4
LENGTHS = {"short": 32, "long": 30_000}  # characters of an observation
Step = Callable[[], object]


class Talk(rlenv.TextEnv):
    """Says `length` characters a turn."""

    def __init__(self, length: int = 32) -> None:
        super().__init__()
        self.said = "x" * length

    def start(self, options: Mapping[str, Any]) -> str:
        return self.said

    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn(1.0, self.said, terminated=self.turns == TURNS, info={"turn": self.turns})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/env_overhead.json"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each measurement in a round")
    options = parser.parse_args(argv)
    rates = {form: _measure(length, options.rounds, options.seconds) for form, length in LENGTHS.items()}
    result = _summary(rates)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    _plot(result, options.out.with_suffix(".png"))
    print(json.dumps(result["checks"], indent=1))
    return 0 if all(check["pass"] for check in result["checks"].values()) else 1


def _measure(length: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Env-steps per second [rounds] of each contender; the order turns by one each round."""
    with contextlib.ExitStack() as stack:
        contenders = _contenders(length, stack)
        repeats = {name: _repeats(step, seconds) for name, step in contenders.items()}
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        names = [*contenders]
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began = time.perf_counter()
                for _ in range(repeats[name]):
                    contenders[name]()
                rates[name].append(ENVS * repeats[name] / (time.perf_counter() - began))
        return rates


def _contenders(length: int, stack: contextlib.ExitStack) -> dict[str, Step]:
    actions = ("an answer",) * ENVS
    made = {
        "rlenv": rlenv.make_vec("benchmarks/talk-v0", ENVS, length=length),
        "gymnasium sync": SyncVectorEnv([_make(length)] * ENVS),
        "gymnasium async": AsyncVectorEnv([_make(length)] * ENVS, shared_memory=False, context="forkserver"),
    }
    steps: dict[str, Step] = {}
    for name, envs in made.items():
        stack.callback(envs.close)
        envs.reset(seed=0)
        steps[name] = functools.partial(envs.step, actions)
    return steps | _gem(length, actions) | _skyrl(length)


def _make(length: int) -> Callable[[], gymnasium.Env[str, str]]:
    def make() -> gymnasium.Env[str, str]:
        _register()  # in a worker as well
        return gymnasium.make("benchmarks/talk-v0", length=length)

    return make


def _register() -> None:
    rlenv.register("benchmarks/talk-v0", "benchmarks.env_overhead:Talk")


def _gem(length: int, actions: tuple[str, ...]) -> dict[str, Step]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from gem.core import Env
            from gem.vector.sync_vector_env import SyncVectorEnv as GemVectorEnv
            from gem.vector.vector_env import AutoresetMode
    except ImportError:
        return {}

    class GemTalk(Env):
        turns = 0

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            self.turns = 0
            return "x" * length, {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.turns += 1
            return "x" * length, 1.0, self.turns == TURNS, False, {"turn": self.turns}

    envs = GemVectorEnv(["talk"] * ENVS, [GemTalk] * ENVS, AutoresetMode.NEXT_STEP)
    envs.reset(seed=0)
    return {"gem-llm": functools.partial(envs.step, actions)}


def _skyrl(length: int) -> dict[str, Step]:
    try:
        from skyrl_gym.envs.base_text_env import BaseTextEnv
    except ImportError:
        return {}

    class SkyTalk(BaseTextEnv):
        def step(self, action: str) -> dict[str, Any]:
            self.turns += 1
            said = [{"role": "user", "content": "x" * length}]
            return {"observations": said, "reward": 1.0, "done": self.turns == TURNS, "metadata": {"turn": self.turns}}

    envs = [SkyTalk() for _ in range(ENVS)]

    def step() -> None:
        for slot, env in enumerate(envs):
            if env.step("an answer")["done"]:
                envs[slot] = SkyTalk()
                envs[slot].init([])

    return {"skyrl-gym": step}


def _repeats(step: Step, seconds: float) -> int:
    """How many steps fill the time; they also warm the contender up."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    return max(count, 1)


def _summary(rates: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    sync = _ratio(rates["short"], "gymnasium sync")
    asynchronous = _ratio(rates["long"], "gymnasium async")
    return {
        "hardware": hardware("cpu"),
        "versions": {name: _version(name) for name in ("gymnasium", "numpy", "gem-llm", "skyrl-gym")}
        | {"python": platform.python_version()},
        "envs": ENVS,
        "turns": TURNS,
        "characters": LENGTHS,
        "env_steps_per_s": {
            form: {name: round(float(np.median(values))) for name, values in by_name.items()}
            for form, by_name in rates.items()
        },
        "checks": {
            "short, rlenv / gymnasium sync": {**sync, "at_least": 0.9, "pass": sync["lower"] >= 0.9},
            "long, rlenv / gymnasium async": {**asynchronous, "at_least": 10.0, "pass": asynchronous["lower"] >= 10.0},
        },
    }


def _ratio(rates: dict[str, list[float]], other: str) -> dict[str, float]:
    ratios = np.array(rates["rlenv"]) / np.array(rates[other])
    drawn = np.random.default_rng(0).choice(ratios, size=(2000, len(ratios)))
    return {
        "median": round(float(np.median(ratios)), 3),
        "lower": round(float(np.quantile(np.median(drawn, axis=1), 0.025)), 3),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LENGTHS), figsize=(10, 3.2), layout="constrained")
    for axis, (form, rates) in zip(axes, result["env_steps_per_s"].items(), strict=True):
        bars = axis.barh([*rates], [*rates.values()], color=["#d1495b", *["#8d99ae"] * (len(rates) - 1)])
        axis.bar_label(bars, labels=[f"{rate:,}" for rate in rates.values()], padding=3)
        axis.set_xscale("log")
        axis.set_xlim(1e3, 10 * max(rates.values()))
        axis.invert_yaxis()
        axis.set_title(f"{LENGTHS[form]:,} characters an observation")
        axis.set_xlabel("env-steps per second (log)")
    figure.suptitle(f"{ENVS} environments, {result['hardware']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_register()
if __name__ == "__main__":
    sys.exit(main())
