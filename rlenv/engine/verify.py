"""Anybody's vLLM server and a checkpoint go in; whether the server computes with those very weights comes out.

Two parts, as in a weight update: fingerprints of every tensor that the worker computes with, and log-probs of canaries
against the checkpoint in transformers and float32. What a server cannot be asked is said, not passed over.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from rlenv.engine.remote import Answer, RemoteVLLM, Setup, canaries
from rlenv.engine.transfer.proof import MAX_ABS_FP32, MEAN_ABS_HALF, check_canaries, differences
from rlenv.engine.transfer.update import PROOF_DEADLINE_S
from rlenv.errors import ConfigError, EngineDeadError, EngineError, WeightUpdateError

USUAL_BLOCK = 128  # ids in a block of the prefix cache, where the server cannot be asked


@dataclass
class SyncReport:
    """What was compared: tensors and canaries that match, those that do not, and what could not be compared."""

    url: str
    checkpoint: str
    label: str
    dtype: str = "float32"
    tensors: int = 0  # equal, bit for bit
    wrong: list[str] = field(default_factory=list)  # what differs, and how
    canary_gap: float | None = None  # |Δ log-prob| in nats, as it is judged for the dtype
    not_covered: list[str] = field(default_factory=list)
    smallest: dict[str, float] = field(default_factory=dict)  # what of → the least relative error that would have shown

    @property
    def matches(self) -> bool:
        """Whether something was compared, and nothing differed."""
        return not self.wrong and (self.tensors > 0 or self.canary_gap is not None)

    def lines(self) -> list[str]:
        """The report as people read it."""
        judged = f"largest, limit {MAX_ABS_FP32:g}" if self.dtype == "float32" else f"mean, limit {MEAN_ABS_HALF:g}"
        rows = [f"server       {self.url}: {self.dtype}, weights labelled {self.label!r}"]
        rows += [f"checkpoint   {self.checkpoint}"]
        rows += [f"matches      {self.tensors} tensors, bit for bit"] if self.tensors else []
        if self.canary_gap is not None:
            rows += [f"matches      log-probs of canaries, within {self.canary_gap:.2g} nats ({judged})"]
        rows += [f"differs      {wrong}" for wrong in self.wrong]
        rows += [f"not covered  {what}" for what in self.not_covered]
        rows += [f"would show   {_size(size)} {what}" for what, size in self.smallest.items()]
        return [*rows, self._verdict()]

    def _verdict(self) -> str:
        if self.wrong:
            return "the server does not compute with this checkpoint"
        if not self.matches:
            return "the server could not be compared with this checkpoint"
        if self.not_covered:
            return "no difference was seen in what could be compared"
        return "the server computes with this checkpoint"


def verify_sync(
    url: Annotated[str, tyro.conf.arg(name="", metavar="URL")], checkpoint: str | None = None, token: str | None = None
) -> int:
    """Check that a vLLM server in development mode computes with the weights of a checkpoint.

    Exits with 0 if it does, with 1 if it does not, naming the tensor.

    Args:
        url: The server, such as http://127.0.0.1:8000.
        checkpoint: Folder of a transformers model. Left out, the one that the server says it was started with.
        token: The server's API key, if it has one.
    """
    try:
        report = asyncio.run(compare(url, checkpoint, token))
    except EngineDeadError as error:
        raise ConfigError(str(error)) from None
    print("\n".join(report.lines()))
    return 0 if report.matches else 1


async def compare(url: str, checkpoint: str | None, token: str | None = None) -> SyncReport:
    """Raises ConfigError where nothing can be compared, EngineDeadError if the server is not there."""
    remote = RemoteVLLM(url, token)
    try:
        served, context = await remote.model()
        folder = checkpoint or served
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"{folder!r} is no folder of a saved model: name one with --checkpoint")
        report = SyncReport(remote.url, folder, await remote.label())
        return await _Comparison(remote, report, _load(folder), context).run()
    finally:
        await remote.close()


class _Comparison:
    """One comparison under way, which fills in `report`."""

    def __init__(self, remote: RemoteVLLM, report: SyncReport, model: Any, context: int) -> None:
        self._remote, self._report, self._model, self._context = remote, report, model, context

    async def run(self) -> SyncReport:
        setup = await self._ask_setup()
        self._report.dtype = setup.dtype
        if fingerprinted := not self._report.not_covered:
            await self._compare_tensors()
        if await self._remote.is_paused():
            self._report.not_covered.append("log-probs: the server is paused, so that it answers no request")
        else:
            await self._compare_canaries(setup)
        if self._report.matches:
            self._report.smallest = await asyncio.to_thread(_smallest, self._model, setup.dtype, fingerprinted)
        return self._report

    async def _ask_setup(self) -> Setup:
        """How the server was set up; without our worker extension, as far as it tells."""
        try:
            return await self._remote.setup()
        except EngineDeadError:
            raise
        except ConfigError:
            why = "the server was started without --worker-extension-cls rlenv.engine.transfer.worker.ProofExtension"
        except EngineError as error:
            why = str(error)
        self._report.not_covered.append(f"tensors, one by one: {why}")
        dtype = await self._remote.dtype()
        return Setup(dtype, None, "", self._model.config.vocab_size, USUAL_BLOCK)

    async def _compare_tensors(self) -> None:
        from rlenv.engine.transfer.digest import tensor_digest

        [rows] = await self._remote.weights()
        manifest = {name: tensor_digest(tensor) for name, tensor in self._sender().staged()}
        wrong = dict(differences(manifest, rows, given="in the checkpoint"))
        self._report.wrong += [f"{name}: {how}" for name, how in wrong.items()]
        self._report.tensors = len(manifest.keys() - wrong.keys())

    async def _compare_canaries(self, setup: Setup) -> None:
        names = (f"canary-{number}" for number in itertools.count())

        async def run(prompt: Sequence[int], fields: dict[str, Any]) -> Answer:
            return await self._remote.complete(next(names), prompt, fields)

        try:
            async with asyncio.timeout(PROOF_DEADLINE_S):
                results = await canaries(run, setup.vocabulary, setup.block, self._context)
        except TimeoutError:
            raise EngineDeadError(f"{self._report.url} did not sample within {PROOF_DEADLINE_S:.0f} s") from None
        reference = await asyncio.to_thread(self._sender().logprobs, [result.ids for result in results])
        try:
            gap = check_canaries(0, results, reference, setup.dtype)
            self._report.canary_gap = gap.max if setup.dtype == "float32" else gap.mean
        except WeightUpdateError as error:
            self._report.wrong.append(f"log-probs: {error.size:.3g} nats off on the {error.what}")

    def _sender(self) -> Any:
        from rlenv.engine.transfer.sender import ModelSender

        return ModelSender(self._model, backend="shm", dtype=self._report.dtype)


def _load(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _smallest(model: Any, dtype: str, fingerprinted: bool) -> dict[str, float]:
    """The least error that would have shown: of any weight, or where only log-probs were seen, by kind of tensor."""
    import torch

    from rlenv.engine.transfer.sensitivity import canary_limits, fingerprint_limit, representatives

    precision = getattr(torch, dtype)
    if fingerprinted:
        return {"any one weight": fingerprint_limit(precision)}
    limits = canary_limits(model, precision, representatives(model))
    return {f"the whole of {name}": limit for name, limit in limits.items()}


def _size(size: float) -> str:
    return f"a relative error of {size:.1g} in" if size <= 1 else "not even a relative error of 1 in"
