"""Break weight updates on purpose and print what caught each: the fault table.

    python -m benchmarks.faults --out faults.json

Every fault is injected into a live engine with requests in flight. It is caught if the update raises, names what was
wrong, and no token that was sampled under wrong weights is ever proven, which is what the training loop waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlenv.agents.hardware import hardware, versions
from rlenv.engine.base import Manifest, PauseMode, WeightSyncClient
from rlenv.engine.transfer.digest import tensor_digest
from rlenv.engine.transfer.sender import ModelSender, Weights
from rlenv.engine.transfer.sensitivity import canary_limits, fingerprint_limit
from rlenv.engine.transfer.worker import ProofExtension
from rlenv.engine.vllm import VLLMEngine
from rlenv.errors import RlenvError, WeightUpdateError
from rlenv.models import default_model
from rlenv.types import Completion, Sample

LAYER = "model.layers.1"
KINDS = {
    "embedding (tied)": "model.embed_tokens.weight",
    "fused query": f"{LAYER}.self_attn.q_proj.weight",
    "fused value": f"{LAYER}.self_attn.v_proj.weight",
    "attention output": f"{LAYER}.self_attn.o_proj.weight",
    "head norm": f"{LAYER}.self_attn.k_norm.weight",
    "fused gate": f"{LAYER}.mlp.gate_proj.weight",
    "down projection": f"{LAYER}.mlp.down_proj.weight",
    "layer norm": f"{LAYER}.input_layernorm.weight",
    "final norm": "model.norm.weight",
}


@dataclass(frozen=True)
class Fault:
    """One way to break an update. `names` is a pattern that the error must match."""

    name: str
    names: str
    tamper: Callable[[Weights, Weights], Weights] | None = None  # (new weights, old weights) → what is sent instead
    worker: tuple[str, str] | None = None  # what the worker does wrong, and to which tensor
    engine: str | None = None  # what the engine's own side does wrong
    breaks: str | None = None  # the call of the sender that raises
    learner: bool = False  # a NaN in the learner
    harmless: bool = False  # told before a value was touched: old weights and version have to serve on


@dataclass(frozen=True)
class Caught:
    """What became of one fault: the error, and how many of the requests in flight were kept from the loss."""

    fault: str
    error: str
    message: str
    in_flight: int
    withheld: int
    served_on: bool  # whether the old weights went on serving


class FaultExtension(ProofExtension):
    """A worker that can be told to do the wrong thing."""

    def rlenv_break(self, how: str, tensor: str) -> None:
        """Install one fault, or take it back (`how=""`)."""
        from rlenv.engine.transfer import shm

        module: Any = shm
        engine: Any = shm.SharedMemoryWeightTransferEngine
        if not hasattr(module, "whole"):
            module.whole = (shm.repack, engine.receive_weights, engine.finish_weight_update)
            module.saved = []
        module.repack, engine.receive_weights, engine.finish_weight_update = module.whole
        while module.saved:
            corrupted, value = module.saved.pop()
            corrupted.data.copy_(value)
        if how == "does not repack":
            module.repack = lambda model: None
        elif how == "loads nothing":
            engine.receive_weights = lambda self, info: None
        elif how == "dies half way":
            engine.receive_weights = _half(engine.receive_weights)
        elif how == "corrupts":
            engine.finish_weight_update = _corrupting(engine.finish_weight_update, tensor, module.saved)

    def rlenv_slow(self, seconds: str) -> None:
        """Let each step of the engine take so much longer, so that what is to happen in mid-generation does."""
        execute = self.model_runner.execute_model

        def slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(float(seconds))
            return execute(*arguments, **options)

        self.model_runner.execute_model = slowly


class FaultyEngine(VLLMEngine):
    """The engine, with a worker and an own side that can be broken."""

    worker_extension = "benchmarks.faults.FaultExtension"
    broken: str | None = None

    async def set_label(self, label: str) -> None:
        if self.broken != "does not label":
            await super().set_label(label)

    async def hold(self, mode: PauseMode, clear_cache: bool) -> None:
        await super().hold(mode, clear_cache and self.broken != "keeps its prefix cache")

    def salt(self, label: str) -> str:
        return "same" if self.broken == "keeps its prefix cache" else super().salt(label)

    async def break_worker(self, how: str = "", tensor: str = "") -> None:
        await self._call_worker("rlenv_break", how, tensor)

    async def slow_worker(self, seconds: float) -> None:
        """Let each of its steps take so much longer."""
        await self._call_worker("rlenv_slow", str(seconds))

    async def _call_worker(self, method: str, *arguments: str) -> None:
        await asyncio.wrap_future(self.start(self._llm.collective_rpc(method, args=arguments)))


class FaultySender(ModelSender):
    """Says that it sends the model, and sends something else."""

    def __init__(self, model: torch.nn.Module, engine: VLLMEngine, fault: Fault) -> None:
        super().__init__(model, backend=engine.transport, dtype=engine.dtype)
        self._fault = fault
        self._old = [(name, tensor.clone()) for name, tensor in self.staged()]

    def send(self, client: WeightSyncClient) -> Manifest:
        if self._fault.breaks:
            client = _BreakingClient(client, self._fault.breaks)
        if self._fault.tamper is None:
            return super().send(client)
        weights = self.staged()
        manifest = {name: tensor_digest(tensor) for name, tensor in weights}
        self.transport.send(self._fault.tamper(weights, self._old), client)
        return manifest


class _BreakingClient:
    """A connection that breaks before one of the calls; `skip …` leaves the call out instead."""

    def __init__(self, client: WeightSyncClient, at: str) -> None:
        self._client, self._at, self.peer = client, at, client.peer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        if self._at != "skip all":
            self._client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        if self._at == "before the transfer":
            raise ConnectionError("the learner is gone")
        if not self._at.startswith("skip"):
            self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if self._at == "after the transfer":
            raise ConnectionError("the learner is gone")
        if self._at != "skip all":
            self._client.finish_weight_update(weight_version)


def zeroed(tensor: str) -> Callable[[Weights, Weights], Weights]:
    return lambda new, old: [(n, torch.zeros_like(t) if n == tensor else t) for n, t in new]


def stale(tensor: str) -> Callable[[Weights, Weights], Weights]:
    return lambda new, old: [(n, before if n == tensor else t) for (n, t), (_, before) in zip(new, old, strict=True)]


def changed(tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights, Weights], Weights]:
    return lambda new, old: [(n, change(t) if n == tensor else t) for n, t in new]


def without(tensor: str) -> Callable[[Weights, Weights], Weights]:
    return lambda new, old: [(n, t) for n, t in new if n != tensor]


def with_another(tensor: str) -> Callable[[Weights, Weights], Weights]:
    return lambda new, old: [*new, (tensor, torch.zeros(3))]


def catalogue() -> list[Fault]:
    """Every fault of the table."""
    square, oblong = KINDS["attention output"], KINDS["down projection"]
    faults = [Fault(f"{kind} zeroed", re.escape(name), zeroed(name)) for kind, name in KINDS.items()]
    faults += [Fault(f"{kind} skipped, old one kept", re.escape(name), stale(name)) for kind, name in KINDS.items()]
    faults += [
        Fault("square tensor transposed", re.escape(square), changed(square, lambda t: t.T.contiguous())),
        Fault(
            "oblong tensor transposed", re.escape(oblong), changed(oblong, lambda t: t.T.contiguous()), harmless=True
        ),
        Fault("tensor rounded to bfloat16", re.escape(square), changed(square, lambda t: t.bfloat16())),
        Fault("lowest bit of one weight flipped", re.escape(oblong), changed(oblong, _flip_lowest_bit)),
        Fault("two rows swapped", re.escape(oblong), changed(oblong, lambda t: t[[1, 0, *range(2, len(t))]])),
        Fault("NaN in transit", re.escape(square), changed(square, lambda t: t * float("nan"))),
        Fault("NaN in the learner", "not finite", learner=True, harmless=True),
        Fault("tensor missing", re.escape(square), without(square), harmless=True),
        Fault("tensor unknown", "model.extra", with_another("model.extra.weight"), harmless=True),
        Fault("weights one version old", "model", lambda new, old: old),
        Fault("tied lm_head not packed again", "lm_head", worker=("does not repack", "")),
        Fault("label without transfer", "model", worker=("loads nothing", "")),
        Fault("transfer without label", "label", engine="does not label"),
        Fault("prefix cache not cleared", "cached-prefix canary", engine="keeps its prefix cache"),
        Fault("worker dies half way", "transfer|half way", worker=("dies half way", "")),
        Fault("norm corrupted after loading", "k_norm", worker=("corrupts", KINDS["head norm"])),
        Fault("rotary table corrupted", "rotary", worker=("corrupts", "rotary")),
        Fault("learner lost before the transfer", "learner is gone", breaks="before the transfer", harmless=True),
        Fault("learner lost after the transfer", "learner is gone", breaks="after the transfer"),
        Fault("sender sends nothing", "sent anything", breaks="skip all", harmless=True),
        Fault("sender starts and finishes only", "sent anything", breaks="skip the transfer", harmless=True),
    ]
    return faults


async def inject(engine: FaultyEngine, model: Any, fault: Fault, *, requests: int = 8) -> Caught:
    """Break one update with requests in flight, mend the engine with a right one; raises AssertionError if uncaught."""
    version = engine.weight_version
    sender = FaultySender(model, engine, fault)
    engine.broken = fault.engine
    await engine.break_worker(*fault.worker or ())
    await asyncio.wrap_future(engine.start(engine.canaries()))  # so that a cache which outlives the swap holds them
    before = await engine.generate([9, 8, 7], GREEDY)
    flying = [asyncio.create_task(engine.generate([9, 8, 7], LONG)) for _ in range(requests)]
    await asyncio.sleep(0.1)
    perturb(model, seed=version + 1)
    begun = time.perf_counter()
    error = await _update(engine, sender, version + 1, model if fault.learner else None)
    assert time.perf_counter() - begun < LATEST_S, f"{fault.name}: not told in time"
    assert not await engine.is_paused(), f"{fault.name}: left paused"
    engine.broken = None
    await engine.break_worker()
    after = await _served(engine)
    served_on = after is not None and after.labels == before.labels and after.token_ids == before.token_ids
    completions = await asyncio.gather(*flying)
    withheld = [not await is_proven(engine, completion) for completion in completions]
    leaked = [
        completion
        for completion, kept in zip(completions, withheld, strict=True)
        if not kept and max(span.version for span in completion.spans) > version
    ]
    assert error is not None, f"{fault.name}: not caught"
    assert re.search(fault.names, str(error)), f"{fault.name}: the error does not say what was wrong: {error}"
    assert served_on == fault.harmless, f"{fault.name}: old weights {'serve on' if served_on else 'are gone'}"
    assert not served_on or engine.weight_version == version, f"{fault.name}: the version moved"
    assert served_on == (not any(withheld)), f"{fault.name}: {sum(withheld)} of {requests} requests withheld"
    assert not leaked, f"{fault.name}: {len(leaked)} completions under wrong weights count as proven"
    await engine.update_weights(ModelSender(model, backend=engine.transport, dtype=engine.dtype), version + 2)
    assert await is_proven(engine, await engine.generate([9, 8, 7], LONG))
    return Caught(fault.name, type(error).__name__, str(error), requests, sum(withheld), served_on)


async def is_proven(engine: VLLMEngine, completion: Completion) -> bool:
    """Whether the loop would let this completion near the loss."""
    try:
        await engine.proven(completion.labels)
    except WeightUpdateError:
        return False
    return completion.finish_reason != "abort"


def perturb(model: Any, seed: int, size: float = 1e-3) -> None:
    """Move every weight a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def smallest_errors(model: Any) -> dict[str, dict[str, float]]:
    """By dtype: the least relative error of one tensor that the canaries alone would catch, and a fingerprint's."""
    return {str(dtype).removeprefix("torch."): _smallest(model, dtype) for dtype in (torch.float32, torch.bfloat16)}


DEADLINE_S = 60.0
LATEST_S = 30.0  # for an update to say that it failed
GREEDY = Sample(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = Sample(max_tokens=240, ignore_eos=True)


async def _update(
    engine: FaultyEngine, sender: ModelSender, version: int, poisoned: Any
) -> RlenvError | Exception | None:
    saved = None
    if poisoned is not None:
        parameter = next(poisoned.parameters())
        saved = parameter.detach().clone()
        parameter.data[0] = float("nan")
    try:
        await engine.update_weights(sender, version)
    except (RlenvError, ConnectionError) as error:
        return error
    finally:
        if saved is not None:
            parameter.data.copy_(saved)
    return None


async def _served(engine: FaultyEngine) -> Completion | None:
    """What an engine answers, unless it serves no more."""
    try:
        return await engine.generate([9, 8, 7], GREEDY)
    except WeightUpdateError:
        return None


def _smallest(model: Any, dtype: torch.dtype) -> dict[str, float]:
    limits = canary_limits(model, dtype, KINDS.values())
    return {"fingerprint": fingerprint_limit(dtype), **{kind: limits[name] for kind, name in KINDS.items()}}


def _flip_lowest_bit(tensor: torch.Tensor) -> torch.Tensor:
    flipped = tensor.clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    return flipped


def _half(receive: Callable[..., None]) -> Callable[..., None]:
    def half(self: Any, info: Any) -> None:
        count = len(info.names) // 2
        for field in ("names", "dtype_names", "shapes", "offsets"):
            setattr(info, field, getattr(info, field)[:count])
        receive(self, info)
        raise RuntimeError("the worker failed half way")

    return half


def _corrupting(finish: Callable[..., None], tensor: str, saved: list[Any]) -> Callable[..., None]:
    def corrupting(self: Any) -> None:
        finish(self)
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, value in held.items():
            if tensor in name and value.numel():
                saved.append((value, value.clone()))
                value.data.zero_()

    return corrupting


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="where the JSON goes")
    arguments = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    with FaultyEngine(default_model(), device="cpu", max_model_len=256) as engine:
        caught = asyncio.run(_all(engine, model))
    smallest = smallest_errors(model)
    result = {"caught": [asdict(row) for row in caught], "total": len(caught), "smallest_error": smallest,
              "hardware": hardware("cpu"), "versions": versions()}  # fmt: skip
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    print(fault_table(caught))
    print(f"\n{len(caught)} of {len(catalogue())} faults caught\n")
    print(error_table(smallest))
    return 0


def fault_table(caught: Sequence[Caught]) -> str:
    """What became of each fault, as Markdown."""
    rows = ["| fault | caught as | withheld of in flight | old weights served on |", "|---|---|---|---|"]
    for row in caught:
        message, served_on = row.message.replace("|", "\\|"), "yes" if row.served_on else "no"
        rows.append(f"| {row.fault} | {message} | {row.withheld} of {row.in_flight} | {served_on} |")
    return "\n".join(rows)


def error_table(smallest: dict[str, dict[str, float]]) -> str:
    """The least relative errors that are seen, as Markdown. "none" is an error as large as the weights, unseen."""
    dtypes = list(smallest)
    rows = [f"| seen by | {' | '.join(dtypes)} |", "|---|" + "---|" * len(dtypes)]
    for kind in smallest[dtypes[0]]:
        sizes = (f"{smallest[dtype][kind]:.1g}" if smallest[dtype][kind] <= 1 else "none" for dtype in dtypes)
        seen_by = "fingerprint, any tensor" if kind == "fingerprint" else f"canaries, {kind}"
        rows.append(f"| {seen_by} | {' | '.join(sizes)} |")
    return "\n".join(rows)


async def _all(engine: FaultyEngine, model: Any) -> list[Caught]:
    caught = []
    for fault in catalogue():
        caught.append(await asyncio.wait_for(inject(engine, model, fault), DEADLINE_S))
        print(f"caught: {fault.name}", file=sys.stderr, flush=True)
    return caught


if __name__ == "__main__":
    sys.exit(main())
