"""The command line goes in, an exit status comes out: `rlenv train`, `demo`, `replay`, `list`, `serve`, `verify-sync`.

0 done · 1 the run failed, or what was compared differs · 2 what was typed cannot work · 130 Ctrl-C
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

import rlenv
from rlenv.agents.audit_config import AuditConfig
from rlenv.agents.config import TrainConfig, check_surroundings
from rlenv.agents.display import display_for
from rlenv.agents.interrupt import Interrupted, leave_at_once, run_interruptible
from rlenv.agents.parts import open_parts
from rlenv.agents.run import Run, RunLearner
from rlenv.agents.terminal import Terminal, output_to
from rlenv.agents.transcript import show_replay
from rlenv.engine.base import Engine
from rlenv.engine.serving import serve_until_ended
from rlenv.engine.verify import verify_sync
from rlenv.errors import ConfigError, EngineError

DEMO = TrainConfig("math-v0", steps=60, run_dir="runs/demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. What goes wrong is one line on standard error; a traceback is left to the run folder.

    Modules beside which it is typed can be imported, as with `python -m`: they may hold tasks.
    """
    sys.path.insert(0, os.getcwd())
    try:
        status = tyro.extras.subcommand_cli_from_dict(
            {
                "train": train,
                "demo": demo,
                "audit": audit,
                "replay": replay,
                "list": list_tasks,
                "serve": serve_until_ended,
                "verify-sync": verify_sync,
            },
            prog="rlenv",
            description="Reinforcement learning of language models on one shared rollout engine.",
            args=arguments,
            config=(tyro.conf.PositionalRequiredArgs,),
        )
    except ConfigError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        leave_at_once(130)
    except Interrupted as end:
        leave_at_once(end.status)
    except Exception as error:
        leave_at_once(_say(error, 1))
    return status or 0


def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> None:
    """Train a model on a task."""
    check_surroundings(config)
    terminal = Terminal.copied()
    run = Run(config, display_for(config.steps, terminal.out), _open_quiet_parts)
    result = run_interruptible(run(), notices=terminal.err)
    before, after = result.summary.get("eval_before"), result.summary.get("eval_after")
    if after is not None:
        print(f"held-out accuracy at temperature 1: {before:.3f} → {after:.3f}")
    print(f"model, metrics and curves: {result.folder}")


def demo(config: Annotated[TrainConfig, tyro.conf.arg(name="")] = DEMO) -> None:
    """Watch the default model learn sums, within minutes on two cores."""
    train(config)


def audit(config: Annotated[AuditConfig, tyro.conf.arg(name="")]) -> int:
    """Measure each cause by which engine and learner may disagree at equal weights, and name those that do."""
    from rlenv.agents import audit_report
    from rlenv.agents.audit import audit as measure

    rlenv.spec(config.task)
    errors = Console(stderr=True)
    with errors.status("") as status:

        def tell(phase: str) -> None:
            status.update(phase)
            if not errors.is_terminal:
                errors.print(phase)

        result = measure(config, tell)
    audit_report.show(result, Console())
    if config.out:
        audit_report.write(result, Path(config.out))
    return 0 if result.passed else 1


def replay(file: Annotated[str, tyro.conf.arg(name="", metavar="FILE")], index: int = 0, failures: bool = False) -> int:
    """Show a recorded rollout, and grade it again by playing its actions once more.

    Args:
        file: A parquet file of trajectories, or the folder of a run made with --save-trajectories.
        index: Which one, counted from 0.
        failures: Count only those that failed.
    """
    return show_replay(file, index, failures=failures, console=Console())


def list_tasks() -> None:
    """List the tasks there are."""
    print("\n".join(rlenv.list()))


@asynccontextmanager
async def _open_quiet_parts(config: TrainConfig) -> AsyncIterator[tuple[Engine, RunLearner]]:
    """The parts of a run, whose output goes to a log beside its summary instead of across the display."""
    log = Path(config.run_dir) / "engine.log"
    with output_to(log):
        try:
            async with open_parts(config) as parts:
                yield parts
        except EngineError as error:
            error.add_note(f"engine's output: {log}")
            raise


def _say(error: Exception, status: int) -> int:
    """One line: what went wrong (a quoted traceback is told by its last line) and where to read more."""
    lines = str(error).strip().splitlines() or [""]
    parts = [] if status == 2 else [f"{type(error).__name__}:"]
    parts += dict.fromkeys((lines[0], lines[-1].strip()))
    parts += [f"({note})" for note in getattr(error, "__notes__", ())]
    print("rlenv:", *parts, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
