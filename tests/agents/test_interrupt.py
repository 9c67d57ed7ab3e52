"""Signals: the first ends a run in order, the second at once, and neither leaves a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlenv.agents.interrupt import run_interruptible

SCRIPT = """
import asyncio, subprocess, sys
from rlenv.agents.interrupt import Interrupted, run_interruptible

async def main():
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        {cleanup}
        child.kill()
        child.wait()
        print("cleaned", flush=True)

try:
    run_interruptible(main())
except Interrupted as end:
    sys.exit(end.status)
"""


def started(tmp_path: Path, cleanup: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(cleanup=cleanup))
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    return run, psutil.Process(int(run.stdout.readline()))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_one_signal_lets_the_cleanup_run(tmp_path: Path, number: int, status: int) -> None:
    run, child = started(tmp_path, "pass")
    run.send_signal(number)
    output, _ = run.communicate(timeout=20)
    assert run.returncode == status and output.strip() == "cleaned" and not child.is_running()


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_a_cleanup_that_hangs(tmp_path: Path) -> None:
    run, child = started(tmp_path, "__import__('time').sleep(600)")
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=20)
    assert run.returncode == 130 and output == ""
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_without_a_signal_results_and_errors_pass_through() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise OSError("disk")

    former = signal.getsignal(signal.SIGINT)
    assert run_interruptible(answer()) == 42
    with pytest.raises(OSError, match="disk"):
        run_interruptible(fail())
    assert signal.getsignal(signal.SIGINT) is former
