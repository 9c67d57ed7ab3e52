"""Workers are killable, capped, shared, and never outlive or burden the process that uses them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlenv.grading import grade_math, grade_math_async
from rlenv.grading.pool import Pool, shared_pool

ENDLESS = r"\sum_{a=1}^{999} \sum_{b=1}^{999} \sum_{c=1}^{999} \sin(abc)"  # a billion sines
BOXED_ENDLESS = rf"\boxed{{{ENDLESS}}}"
ENDLESS_FOR_MATH_VERIFY = r"\boxed{\int_0^{10^9} \lfloor x^{x} \rfloor \, dx}"


def python(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=check, timeout=60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("response", [BOXED_ENDLESS, pytest.param(ENDLESS_FOR_MATH_VERIFY, marks=pytest.mark.slow)])
def test_a_hanging_answer_is_cut_off_in_time_and_abstained_on(response: str) -> None:
    started = time.perf_counter()
    verdict = grade_math(response, "1", timeout_s=0.5)
    assert verdict.correct is None
    assert "ran past its time" in verdict.reason
    assert 0.4 < time.perf_counter() - started < 15.0  # loading math-verify is charged to no answer
    assert grade_math(r"\boxed{1/2}", "0.5").correct


@pytest.mark.slow
def test_the_clock_starts_at_execution_not_while_queued(pool: Pool) -> None:
    slow = {"candidate": ENDLESS, "reference": "1"}
    quick = {"candidate": "1/2", "reference": "0.5"}
    with ThreadPoolExecutor(pool.size + 1) as threads:
        blocked = [threads.submit(pool.ask, slow, 0.7) for _ in range(pool.size)]
        time.sleep(0.1)
        queued = threads.submit(pool.ask, quick, 0.5)
        assert queued.result()["correct"] is True
        assert all("past its time" in str(each.exception()) for each in blocked)


def test_a_worker_caps_its_memory() -> None:
    code = "from rlenv.grading.worker import _confine; _confine(); bytearray(3 << 30)"
    assert "MemoryError" in python(code, check=False).stderr


def test_a_worker_may_start_nothing_write_nothing_and_compile_nothing(tmp_path: Path) -> None:
    code = f"""
import os, socket, subprocess
from rlenv.grading import worker
worker._confine()
attempts = [
    lambda: os.system("true"), lambda: subprocess.run(["true"]), lambda: eval("1 + 1"), lambda: exec("pass"),
    lambda: open({str(tmp_path / "file")!r}, "w"), lambda: socket.socket().connect(("127.0.0.1", 9)), os.fork,
]
for attempt in attempts:
    try:
        with worker._clock(5.0):
            attempt()
    except PermissionError as error:
        print(error)
"""
    assert len(python(code).stdout.splitlines()) == 7
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sympy_is_barred_from_evaluating_text() -> None:
    code = """
import sympy
from rlenv.grading import mathverify
mathverify.load()
for text in ("__import__('os').getcwd()", "exit(0)", "x + 1"):
    try:
        print("evaluated", sympy.sympify(text))
    except (PermissionError, sympy.SympifyError):
        print("refused")
print(mathverify.same(r"\\lim_{x \\to 0} \\frac{\\sin x}{x}", "1"))
"""
    assert python(code).stdout.split() == ["refused", "refused", "refused", "True"]


def test_importing_is_light_and_starts_nothing() -> None:
    code = """
import sys, rlenv.grading
from rlenv.grading import pool
print(sorted({"sympy", "mpmath", "math_verify", "torch", "vllm"} & set(sys.modules)), pool._pool)
"""
    assert python(code).stdout.strip() == "[] None"


def test_a_worker_loads_neither_the_library_nor_gymnasium() -> None:
    code = """
from pathlib import Path
from rlenv.grading import grade_math
from rlenv.grading.pool import shared_pool
grade_math(r"\\boxed{1/2}", "0.5")
worker, = shared_pool()._workers
print("gymnasium" in Path(f"/proc/{worker._process.pid}/maps").read_text(), end=" ")
print("numpy" in Path(f"/proc/{worker._process.pid}/maps").read_text())
"""
    assert python(code).stdout.split() == ["False", "False"]


def test_workers_are_shared_over_threads() -> None:
    with ThreadPoolExecutor(16) as threads:
        assert all(verdict.correct for verdict in threads.map(lambda _: grade_math(r"\boxed{1/2}", "0.5"), range(64)))
    assert len(shared_pool()._workers) <= shared_pool().size


def test_a_worker_that_was_killed_is_replaced(pool: Pool) -> None:
    quick = {"candidate": "1/2", "reference": "0.5"}
    assert pool.ask(quick, 5.0)["correct"]
    (worker,) = pool._workers
    worker._process.kill()
    worker._process.wait()
    assert pool.ask(quick, 5.0)["correct"]


def test_closing_ends_the_workers_twice_over(pool: Pool) -> None:
    pool.ask({"reference": "7"}, 5.0)
    pids = [worker._process.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert not any(map(alive, pids))


EXIT = """
import os, signal, sys
from rlenv.grading import grade_math
from rlenv.grading.pool import shared_pool
grade_math(r"\\boxed{1/2}", "0.5")
print(*(worker._process.pid for worker in shared_pool()._workers), flush=True)
"""


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit(1)"])
def test_no_worker_outlives_its_parent(ending: str) -> None:
    pids = [int(pid) for pid in python(EXIT + ending, check=False).stdout.split()]
    assert pids
    assert gone_within(pids, 5.0)


@pytest.mark.slow
def test_a_worker_amid_a_request_dies_with_its_parent_too() -> None:
    code = f"""
import os, signal, threading, time
from rlenv.grading import grade_math
from rlenv.grading.pool import shared_pool
threading.Thread(target=grade_math, args=({BOXED_ENDLESS!r}, "1"), kwargs={{"timeout_s": 1.5}}, daemon=True).start()
time.sleep(0.8)
print(*(worker._process.pid for worker in shared_pool()._workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pids = [int(pid) for pid in python(code, check=False).stdout.split()]
    assert pids
    assert gone_within(pids, 5.0)


@pytest.mark.slow
def test_a_forked_child_makes_its_own_workers_and_leaves_its_parents_alone() -> None:
    code = (
        EXIT
        + """
child = os.fork()
if child == 0:
    verdict = grade_math(r"\\boxed{2/4}", "0.5")
    theirs = [worker._process.pid for worker in shared_pool()._workers]
    print(verdict.correct, *theirs, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(grade_math(r"\\boxed{3/6}", "0.5").correct, *(worker._process.pid for worker in shared_pool()._workers))
"""
    )
    mine, theirs, after = (line.split() for line in python(code).stdout.splitlines())
    assert (theirs[0], after[0]) == ("True", "True")
    assert set(theirs[1:]).isdisjoint(mine)
    assert after[1:] == mine
    assert gone_within([int(pid) for pid in mine + theirs[1:]], 5.0)


@pytest.mark.slow
def test_a_forked_child_does_not_keep_a_killed_parents_workers_alive() -> None:
    code = (
        EXIT
        + """
if os.fork() == 0:
    import time
    os.close(1); os.close(2); time.sleep(20); os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    pids = [int(pid) for pid in python(code, check=False).stdout.split()]
    assert gone_within(pids, 5.0)


def test_an_interrupt_ends_the_worker_amid_its_request(pool: Pool) -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.ask({"candidate": ENDLESS, "reference": "1"}, 5.0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert pool.ask({"candidate": "1/2", "reference": "0.5"}, 5.0)["correct"]


def test_grading_leaves_the_event_loop_free() -> None:
    async def lag() -> float:
        check = asyncio.create_task(grade_math_async(BOXED_ENDLESS, "1", timeout_s=0.5))
        worst = 0.0
        while not check.done():
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - before)
        assert check.result().correct is None
        return worst

    assert asyncio.run(lag()) < 0.4


def test_a_worker_inherits_no_descriptor_of_its_parent(tmp_path: Path, pool: Pool) -> None:
    with open(tmp_path / "big", "wb") as file:
        os.set_inheritable(file.fileno(), True)
        pool.ask({"reference": "7"}, 5.0)
        (worker,) = pool._workers
        held = [os.readlink(link) for link in Path(f"/proc/{worker._process.pid}/fd").iterdir()]
    assert str(tmp_path / "big") not in held
