"""A coroutine goes in, its result comes out; one Ctrl-C ends it in order, a second one at once.

The first SIGINT or SIGTERM cancels the coroutine, whose cleanup then runs. The second kills every process below this
one and leaves. Either way the exit status is 128 + the signal's number: 130 for Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, NoReturn, TypeVar

import psutil

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run was ended by a signal; `status` is the exit status that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def run_interruptible(coroutine: Coroutine[Any, Any, T], notices: IO[str] | None = None) -> T:
    """Run to the end on an event loop of its own, from the main thread. Raises Interrupted after a signal.

    What the coroutine raises while it is being cancelled is not the cause of its end, and gives way to Interrupted.
    That a signal came is told on `notices` (standard error).
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    with _signals_cancel(task, notices or sys.stderr) as received:
        try:
            with runner:
                return loop.run_until_complete(task)
        except BaseException:
            if received:
                raise Interrupted(received[0]) from None
            raise


def leave_at_once(status: int) -> NoReturn:
    """Kill what this process started, and exit without further cleanup."""
    kill_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def kill_descendants() -> None:
    """Kill all processes below this one, except Python's resource tracker: it removes shared memory after our end."""
    for process in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
        except psutil.NoSuchProcess:
            continue


@contextmanager
def _signals_cancel(task: asyncio.Task[Any], notices: IO[str]) -> Iterator[list[int]]:
    """Let a first signal cancel `task` and a second one leave; gives the signals that have come."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            leave_at_once(128 + received[0])
        task.get_loop().call_soon_threadsafe(task.cancel)
        print("stopping in order; a second Ctrl-C forces it", file=notices, flush=True)

    former = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
