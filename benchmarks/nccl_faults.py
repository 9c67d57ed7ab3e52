"""Break weight transfers over the real NCCL on purpose, and print what became of each.

    python -m benchmarks.nccl_faults --out nccl_faults.json

The engine is on the first GPU, the learner in a process that has the second for itself; with one GPU NCCL takes it for
one on another host. A fault passes if the update ends in time with an error that names what was wrong, no version is
committed, and a learner without a fault then brings weights that are proven.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.faults import is_proven
from benchmarks.swap import SHAPES, make_model
from rlenv.agents.hardware import hardware, versions
from rlenv.agents.learner_handle import LearnerHandle
from rlenv.agents.learner_types import LearnerConfig
from rlenv.engine.base import Manifest, Peer, WeightSyncClient
from rlenv.engine.transfer.patience import transfer_deadline_s
from rlenv.engine.vllm import VLLMEngine
from rlenv.errors import ConfigError, RlenvError
from rlenv.types import Completion, Sample

Side = Literal["learner", "engine"]
LATENCY_S = 10.0  # to import NCCL, to notice what its own deadline ended, to try again, and to tell
NO_NCCL = {"VLLM_NCCL_SO_PATH": "libm.so.6"}  # a library without NCCL's symbols
REQUESTS, REQUEST_TOKENS = 8, 400


@dataclass(frozen=True)
class Fault:
    """`variables` are those of `side`'s process, which is killed in mid-transfer where there are none."""

    name: str
    side: Side
    names: str  # what its error has to say
    variables: Mapping[str, str] = field(default_factory=dict)


FAULTS = (
    Fault("the learner's NCCL lacks symbols", "learner", "ConfigError: NCCL cannot be used", NO_NCCL),
    Fault("the learner pins NCCL otherwise", "learner", r"ConfigError: .*NCCL_PROTO \(LL there", {"NCCL_PROTO": "LL"}),
    Fault("the learner is killed in mid-transfer", "learner", r"(Learner|WeightUpdate)Error: .*process ended"),
    Fault("the engine is killed in mid-transfer", "engine", "EngineDeadError: "),
    Fault("the engine's NCCL lacks symbols", "engine", "ConfigError: .*NCCL cannot be used", NO_NCCL),
)


@dataclass(frozen=True)
class Outcome:
    fault: str
    error: str
    seconds: float
    deadline_s: float
    committed: bool
    in_flight: dict[str, int]  # how many requests ended how
    proven: int  # of them, whose tokens may be trained on
    recovery_s: float  # until weights were proven again, with the start of what had ended
    passed: bool


class Interrupted:
    """The client of an update; `end` is called `after_s` into the transfer."""

    def __init__(self, client: WeightSyncClient, after_s: float, end: Callable[[], None]) -> None:
        self._client, self._timer = client, threading.Timer(after_s, end)

    @property
    def peer(self) -> Peer:
        return self._client.peer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._timer.start()
        self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(weight_version)


@dataclass
class Breaking:
    """A learner in whose first transfer a side ends."""

    learner: LearnerHandle
    after_s: float
    end: Callable[[], None]

    def send(self, client: WeightSyncClient) -> Manifest:
        return self.learner.send(Interrupted(client, self.after_s, self.end))

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.learner.logprobs(sequences)


class Bench:
    """The engine, the learner, and what is done to them."""

    def __init__(self, arguments: argparse.Namespace, model: str, log: Path) -> None:
        self.device, self.model, self.log = arguments.device, model, log
        on_gpu: dict[str, Any] = {"transport": "nccl", "gpu_memory_utilization": 0.2} if self.device == "cuda" else {}
        self.engine = VLLMEngine(model, device=self.device, **on_gpu)
        self.learner = self._new_learner({})
        self.transfer_s = 0.0

    def close(self) -> None:
        self.learner.close()
        self.engine.close()

    async def right_updates(self) -> None:
        """The first meets the learner, the second tells how long a transfer takes."""
        for version in (1, 2):
            report = await self.engine.update_weights(self.learner, version)
            self.transfer_s = report.transfer_s

    async def injected(self, fault: Fault) -> Outcome:
        before = self.engine.weight_version
        await self._replace_learner(fault.variables if fault.side == "learner" else {})
        if fault.side == "engine" and fault.variables:
            with environment(fault.variables), suppress(ConfigError):  # which is looked at below
                await self.engine.restart(self.learner)
        requests = await self._requests()
        begun = time.perf_counter()
        error = await self._error_of_update(fault, before + 1)
        seconds = time.perf_counter() - begun
        committed = self.engine.weight_version != before
        recovery_s = await self._recover(fault, before + 1)
        completions, ends = await self._ended(requests)
        deadline_s = LATENCY_S
        if fault.side == "learner" and not fault.variables:
            deadline_s += self._nccl_deadline_s()
        return Outcome(
            fault=fault.name,
            error=error,
            seconds=seconds,
            deadline_s=deadline_s,
            committed=committed,
            in_flight=ends,
            proven=[await is_proven(self.engine, completion) for completion in completions].count(True),
            recovery_s=recovery_s,
            passed=re.match(fault.names, error, re.DOTALL) is not None and seconds <= deadline_s and not committed,
        )

    async def _error_of_update(self, fault: Fault, version: int) -> str:
        sender: Any = self.learner
        if not fault.variables:
            end = self._kill_learner if fault.side == "learner" else self._kill_engine
            sender = Breaking(self.learner, self.transfer_s / 2, end)
        try:
            await self.engine.update_weights(sender, version)
        except RlenvError as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    async def _recover(self, fault: Fault, version: int) -> float:
        begun = time.perf_counter()
        await self._replace_learner({})
        if fault.side == "engine":
            await self.engine.restart(self.learner)
        await self.engine.update_weights(self.learner, version)
        return time.perf_counter() - begun

    async def _requests(self) -> list[asyncio.Task[Completion]]:
        sample = Sample(max_tokens=REQUEST_TOKENS, ignore_eos=True)
        requests = [asyncio.create_task(self.engine.generate([5 + i, 7, 9], sample)) for i in range(REQUESTS)]
        await asyncio.sleep(0.1)
        return requests

    async def _ended(self, requests: Sequence[asyncio.Task[Completion]]) -> tuple[list[Completion], dict[str, int]]:
        """Raises TimeoutError if one never comes back."""
        ends = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)
        completions = [end for end in ends if isinstance(end, Completion)]
        how = Counter(end.finish_reason if isinstance(end, Completion) else type(end).__name__ for end in ends)
        return completions, dict(how)

    def _nccl_deadline_s(self) -> float:
        count = sum(path.stat().st_size for path in Path(self.model).glob("*.safetensors"))
        return transfer_deadline_s(count)

    async def _replace_learner(self, variables: Mapping[str, str]) -> None:
        self.learner.close()
        self.learner = self._new_learner(variables)
        await self.learner.ready()

    def _new_learner(self, variables: Mapping[str, str]) -> LearnerHandle:
        cuda, apart = self.device == "cuda", torch.cuda.device_count() > 1
        with environment({**variables, "NCCL_HOSTID": "learner"} if cuda and not apart else variables):
            return LearnerHandle(
                LearnerConfig(
                    self.model,
                    device=self.device,
                    gpu=1 if apart else None,
                    mixed_precision="bf16" if cuda else "no",
                    transfer_backend=self.engine.transport,
                    transfer_dtype=self.engine.dtype,
                ),
                log=self.log,
            )

    def _kill_learner(self) -> None:
        psutil.Process(self.learner.pid).kill()

    def _kill_engine(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if "VLLM::" in " ".join(process.cmdline()[:1]):
                process.kill()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(f"{folder}/model", arguments, seed=1)
        outcomes, left = asyncio.run(run(arguments, model, Path(folder) / "learner.log"))
    passed = all(outcome.passed for outcome in outcomes) and not left
    print(f"{'PASS' if passed else 'FAIL'}: {len(left)} processes left")
    result = {
        "passed": passed,
        "faults": [asdict(outcome) for outcome in outcomes],
        "processes_left": left,
        "shape": arguments.shape,
        "hardware": hardware(arguments.device),
        "versions": versions(),
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if passed else 1


async def run(arguments: argparse.Namespace, model: str, log: Path) -> tuple[list[Outcome], list[str]]:
    """What became of each fault, and the names of processes that were left at the end."""
    before = set(psutil.Process().children(recursive=True))
    bench, outcomes = await asyncio.to_thread(Bench, arguments, model, log), list[Outcome]()
    try:
        await bench.right_updates()
        for fault in FAULTS:
            if arguments.device == "cuda" or not fault.variables:
                outcome = await bench.injected(fault)
                verdict = "pass" if outcome.passed else "FAIL"
                print(f"{verdict}: {outcome.fault}: {outcome.seconds:.1f} s: {outcome.error}", flush=True)
                outcomes.append(outcome)
    finally:
        await asyncio.to_thread(bench.close)
    left = set(psutil.Process().children(recursive=True)) - before
    return outcomes, sorted(process.name() for process in left if "resource_tracker" not in " ".join(process.cmdline()))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes inherit that are started meanwhile."""
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.nccl_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: both kills, by shared memory")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b")
    parser.add_argument("--std", type=float, default=0.03, help="of the random weights")
    parser.add_argument("--out", help="where the JSON goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
