"""Requests come in on standard input, one JSON object a line; verdicts go out on standard output, likewise.

The process is built to be killed: the kernel's alarm ends it when a request runs past its time, even within one long
operation of C code; its memory is capped; it ends by itself when its input closes, as it does when its parent dies.
Once ready it may start no process, open no socket, write no file and compile no text.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlenv.grading import mathverify
from rlenv.grading.judge import judge, reference_problem
from rlenv.grading.verdict import Verdict

MEMORY_CAP = 1 << 30  # bytes beyond what the process holds when it is ready
_FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.", "socket.")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_GENERATED = ("b'def monomial_", "def monomial_", "None")  # SymPy writes itself code for polynomials

_guarded = False  # whether an audited event is refused now
_refusals: list[str] = []  # the events refused in this request: a library may swallow the error


def main() -> None:
    """Serve until the input closes."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not look like a verdict
    _confine()
    _say(replies, {"ready": True})
    for line in sys.stdin:
        _say(replies, _answer(json.loads(line)))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _judged(request)
    except mathverify.NotLoaded:
        mathverify.load()
        return _judged(request)


def _judged(request: dict[str, Any]) -> dict[str, Any]:
    candidate, reference = request.get("candidate"), request["reference"]
    try:
        with _clock(request["timeout_s"]):
            if candidate is None:
                return {"problem": reference_problem(reference)}
            verdict = judge(candidate, reference)
        if _refusals:
            verdict = Verdict(None, f"judging would take what is forbidden: {_refusals[0]}")
    except mathverify.NotLoaded:
        raise
    except MemoryError:
        verdict = Verdict(None, "judging takes more memory than the cap allows")
    except RecursionError:
        verdict = Verdict(False, "the final answer nests too deeply")
    except Exception as error:
        verdict = Verdict(None, f"the grader failed with {type(error).__name__}")
    return {"correct": verdict.correct, "reason": verdict.reason, "problem": verdict.reason}


@contextmanager
def _clock(seconds: float) -> Iterator[None]:
    """Within, the guard is up, and the alarm kills this process in time: nothing can catch or miss it."""
    global _guarded
    _guarded = True
    _refusals.clear()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _guarded = False


def _confine() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)  # the lexer bounds the length of numbers
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    cap = pages * resource.getpagesize() + MEMORY_CAP
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _guarded:
        return
    writes = event == "open" and arguments[2] & _WRITING
    compiles = event == "compile" and not str(arguments[0]).startswith(_GENERATED)
    if writes or compiles or event.startswith(_FORBIDDEN):
        _refusals.append(event)
        raise PermissionError(f"grading never does {event}")


def _say(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
