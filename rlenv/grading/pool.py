"""Requests to grade go in from any thread, replies of killable worker processes come out.

A process has one pool, made at its first request; a forked child makes its own. A worker serves one request at a
time and its clock starts when it does, so that waiting for a free worker costs a request nothing. Workers are fresh
interpreters (no fork of a big parent, no import of its main module), which end when the pipe to them closes: at exit,
or when this process is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlenv.errors import ConfigError

MAX_WORKERS = 8
START_LIMIT_S = 60.0
GRACE_S = 30.0  # how long past its own clock a worker may be silent (loading math-verify, an overloaded machine)

# A stand-in for the package's __init__: a worker needs neither environments nor Gymnasium.
_BOOT = (
    "import sys, types; package = types.ModuleType('rlenv'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['rlenv'] = package; from rlenv.grading.worker import main; main()"
)


class Gone(Exception):
    """The worker ended or fell silent instead of answering; the message says how."""


class Pool:
    """Up to one worker a core; they start as they are needed."""

    def __init__(self) -> None:
        self.size = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self.executor = ThreadPoolExecutor(self.size, thread_name_prefix="rlenv-grading")
        self._free = threading.BoundedSemaphore(self.size)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to one request. Raises Gone if it was not answered, ConfigError if no worker can start."""
        with self._free:
            worker = self._take()
            try:
                reply = worker.ask({**request, "timeout_s": timeout_s}, timeout_s + GRACE_S)
            except BaseException:  # also KeyboardInterrupt: a worker amid a request answers no other
                worker.end()
                self._workers.discard(worker)
                raise
            self._idle.append(worker)
            return reply

    def close(self) -> None:
        """End every worker."""
        self.executor.shutdown(wait=False)
        for worker in list(self._workers):
            worker.end()
        self._workers.clear()
        self._idle.clear()

    def disown(self) -> None:
        """In a forked child: let go of the parent's workers without ending them."""
        for worker in self._workers:
            worker.disown()

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.lives():
                return worker
            worker.end()
            self._workers.discard(worker)
        worker = _Worker()
        self._workers.add(worker)
        try:
            worker.await_ready()
        except Gone as error:
            worker.end()
            self._workers.discard(worker)
            raise ConfigError(f"no grading worker starts: {error}; `pip install rlenv` brings what it needs") from error
        return worker


def shared_pool() -> Pool:
    """The pool of this process."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = Pool()
            atexit.register(_pool.close)
        return _pool


class _Worker:
    """One worker process and the two pipes to it, which no other child inherits."""

    def __init__(self) -> None:
        there, self._requests = os.pipe()
        self._replies, back = os.pipe()
        self._unread = b""
        package = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, package], stdin=there, stdout=back, env=environment
            )
        finally:
            os.close(there)
            os.close(back)

    def await_ready(self) -> None:
        self._read_line(START_LIMIT_S)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        self._write((json.dumps(request) + "\n").encode("ascii"))
        return dict(json.loads(self._read_line(limit_s)))

    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill and reap; ending twice is ending once."""
        if self._requests < 0:
            return
        self._close_pipes()
        self._process.kill()
        self._process.wait()

    def disown(self) -> None:
        self._close_pipes()
        self._process.returncode = 0  # not our child: there is nothing to reap

    def _close_pipes(self) -> None:
        os.close(self._requests)
        os.close(self._replies)
        self._requests = self._replies = -1

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError as error:
            raise Gone(self._ending()) from error

    def _read_line(self, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        readable = select.poll()
        readable.register(self._replies, select.POLLIN)
        while b"\n" not in self._unread:
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Gone("it fell silent")
            data = os.read(self._replies, 1 << 16)
            if not data:
                raise Gone(self._ending())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ending(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGALRM:
            return "it ran past its time"
        return f"it ended with signal {-code}" if code < 0 else f"it ended with status {code}"


def _forget() -> None:
    global _pool, _lock
    if _pool is not None:
        _pool.disown()
        atexit.unregister(_pool.close)
    _pool, _lock = None, threading.Lock()


_pool: Pool | None = None
_lock = threading.Lock()
os.register_at_fork(after_in_child=_forget)
