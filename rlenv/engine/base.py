"""The contract of a rollout engine: prompt ids go in, exact completions come out, weights can be swapped.

Every engine honours it and passes one suite (tests/rlenv/engine/test_contract.py). `submit` is the
primitive, safe from any thread; `generate` awaits it and `.result()` blocks on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from rlenv.types import Completion, Sample

PauseMode = Literal["abort", "wait", "keep"]
HeadDtype = Literal["float32", "bfloat16"]  # what the output head multiplies in


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A position-dependent fingerprint of one tensor's bits in the engine's dtype, for comparison by value."""

    dtype: str
    shape: tuple[int, ...]
    value: str


Manifest = dict[str, TensorDigest]  # parameter name, as in the checkpoint → its digest


@dataclass(frozen=True, slots=True)
class Peer:
    """The engine at the other end of a transfer: which one, since its how-manieth start, and its workers' number."""

    engine: str
    life: int
    workers: int


class WeightSyncClient(Protocol):
    """What a weight sender may ask of the engine: vLLM's `VLLMWeightSyncClient`, structurally, and who is asked."""

    @property
    def peer(self) -> Peer: ...
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender(Protocol):
    """The trainer's end of an update. All methods block; the engine calls them off its event loop."""

    def send(self, client: WeightSyncClient) -> Manifest:
        """Move every weight to the engine through `client`; return what was sent, digested."""

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities [n - 1] of ids 1..n-1 of each sequence, fp32, under the weights last sent."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one proven update did. Times are seconds; `mismatch_*` are nats over all canary tokens."""

    version: int
    label: str
    pause_s: float
    transfer_s: float
    resume_s: float
    prove_s: float
    in_flight: int
    mismatch_mean: float
    mismatch_max: float
    tensors: int
    refuted: int = 0  # attempts at this update that failed their proof before

    @property
    def stall_s(self) -> float:
        return self.pause_s + self.transfer_s + self.resume_s


@runtime_checkable
class Engine(Protocol):
    """One shared rollout engine."""

    model: str
    max_model_len: int
    dtype: str
    """What it computes in: "float32", "bfloat16" or "float16"."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of `model`."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that serve now."""

    @property
    def in_flight(self) -> int:
        """How many requests were submitted and have not come back."""

    def submit(self, prompt_ids: Sequence[int], sample: Sample, *, request_id: str | None = None) -> Future[Completion]:
        """Queue one request; returns at once. The future never holds a partial result unless it was aborted."""

    async def generate(self, prompt_ids: Sequence[int], sample: Sample, *, request_id: str | None = None) -> Completion:
        """`submit`, awaited on the caller's event loop. Cancelling the await aborts the request."""

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Abort these requests, or all; each comes back with `finish_reason="abort"`."""

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop scheduling. Requests in flight are aborted, waited for, or kept. Pausing twice is pausing once."""

    async def resume(self) -> None:
        """Schedule again; without a pause, nothing happens."""

    async def is_paused(self) -> bool:
        """Whether new tokens are withheld."""

    async def update_weights(
        self, sender: WeightSender, version: int, *, mode: PauseMode = "keep", clear_cache: bool = True
    ) -> UpdateReport:
        """pause → transfer → label → resume → prove. The engine serves on every way out, or it is closed.

        Raises WeightUpdateError when the proof fails twice.
        """

    async def proven(self, labels: Iterable[str]) -> None:
        """Wait until each of these labels is proven; raises WeightUpdateError if one was refuted."""

    async def restart(self, sender: WeightSender, version: int | None = None) -> UpdateReport:
        """Start anew after a death, with the weights of `version` (or of the last one) brought back and proven.

        From a death on, calls that wait and later ones raise EngineDeadError; a restart does not bring requests back.
        A label whose proof a death cut short stays unproven: `proven` raises EngineDeadError for it.
        """

    def close(self) -> None:
        """End the engine and its processes. Closing twice is closing once."""
