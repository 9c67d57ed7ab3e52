"""What a group keeps about each of its engines: its state, its load, what it was asked, and whose turn an update is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, TypeVar

from rlenv.engine.base import Engine, Manifest, UpdateReport, WeightSender, WeightSyncClient
from rlenv.errors import EngineError
from rlenv.types import Completion, Sample

T = TypeVar("T")

# serving: takes requests · ready: runs, but waits for the next update · down: is being started again, or could not be
State = Literal["serving", "ready", "down"]


@dataclass(eq=False, slots=True)
class Member:
    """One engine of a group, the `number`-th; `version` is that of the weights it proved last."""

    engine: Engine
    number: int
    version: int
    state: State = "serving"
    failures: int = 0  # how often it was put in quarantine
    updating: bool = False
    outstanding: int = 0  # tokens that its requests in flight may come to, prompts included
    requests: set[Request] = field(default_factory=set)
    restart: asyncio.Task[None] | None = None
    _asked: set[asyncio.Future[Any]] = field(default_factory=set)

    def take(self, request: Request) -> None:
        self.requests.add(request)
        self.outstanding += request.cost

    def give_back(self, request: Request) -> None:
        self.requests.remove(request)
        self.outstanding -= request.cost

    async def answer(self, call: Awaitable[T], seconds: float | None = None) -> asyncio.Future[T] | None:
        """The outcome of a call of the engine; None when it took too long, or was given up with the engine."""
        asked = asyncio.ensure_future(call)
        asked.add_done_callback(_retrieve)
        self._asked.add(asked)
        try:
            await asyncio.wait({asked}, timeout=seconds)
        finally:
            asked.cancel()
            self._asked.discard(asked)
        return asked if asked.done() and not asked.cancelled() else None

    def give_up(self) -> None:
        """Let whoever waits for the engine go on without it."""
        for asked in self._asked:
            asked.cancel()


@dataclass(eq=False, slots=True)
class Request:
    """One request of a caller, whichever engine has it now."""

    prompt: tuple[int, ...]
    sample: Sample
    name: str
    cost: int  # tokens, prompt included
    aborted: bool = False  # whether a caller wants it aborted
    losses: int = 0  # engines that failed while they had it
    refused_by: set[int] = field(default_factory=set)  # engines whose weights were refuted

    def abandoned(self) -> Completion:
        """What comes back when it was aborted and no engine tells what it had sampled."""
        return Completion(self.name, self.prompt, (), (), (), "", "abort")


class WatchedSender:
    """The sender of one update, which tells whether the trainer's side is what the update waits for, or fails by.

    Once the update is `over`, a sender that comes too late reaches the engine no more.
    """

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self.busy = self.over = False
        self.error: Exception | None = None  # what the sender raised of its own
        self.engines_error: Exception | None = None  # what the engine raised at a call of the sender

    def send(self, client: WeightSyncClient) -> Manifest:
        with self.turn(busy=True), self._blame():
            return self._sender.send(_WatchedClient(client, self))

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with self.turn(busy=True), self._blame():
            return self._sender.logprobs(sequences)

    @contextlib.contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if error is not self.engines_error and not isinstance(error, EngineError):  # that says what an engine did
                self.error = error
            raise

    @contextlib.contextmanager
    def turn(self, *, busy: bool) -> Iterator[None]:
        """Whether the sender is busy inside the block; after it, what was before."""
        before, self.busy = self.busy, busy
        try:
            yield
        finally:
            self.busy = before


class _WatchedClient:
    def __init__(self, client: WeightSyncClient, sender: WatchedSender) -> None:
        self._client, self._sender = client, sender
        self.peer = client.peer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask(self._client.init_weight_transfer_engine, init_info)

    def start_weight_update(self) -> None:
        self._ask(self._client.start_weight_update)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._ask(self._client.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask(self._client.finish_weight_update, weight_version)

    def _ask(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._sender.over:
            raise EngineError("this update of the weights was given up")
        with self._sender.turn(busy=False):
            try:
                call(*arguments)
            except Exception as error:
                self._sender.engines_error = error
                raise


class NoWeightsYet(Exception):
    """What `NoSender` raises."""


class NoSender:
    """Starts an engine without weights: a restart that it is given to ends with `NoWeightsYet`."""

    def send(self, client: WeightSyncClient) -> Manifest:
        raise NoWeightsYet

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NoWeightsYet


def label_in_group(label: str, number: int) -> str:
    """The label of one engine, as a group tells it: `"5"` of engine 1 is `"5#1@1"`, `"5#2"` is `"5#2@1"`."""
    version, _, attempt = label.partition("#")
    return f"{version}#{attempt or 1}@{number}"


def in_group(completion: Completion, number: int) -> Completion:
    """The same completion with labels that name its engine."""
    spans = tuple(replace(span, label=label_in_group(span.label, number)) for span in completion.spans)
    return replace(completion, spans=spans)


def combined(label: str, in_flight: int, reports: Sequence[UpdateReport]) -> UpdateReport:
    """One report of an update: the stall of the engine that stood still longest, the proofs of all."""
    longest = max(reports, key=lambda report: report.stall_s)
    return replace(
        longest,
        label=label,
        in_flight=in_flight,
        prove_s=sum(report.prove_s for report in reports),
        mismatch_mean=fmean(report.mismatch_mean for report in reports),
        mismatch_max=max(report.mismatch_max for report in reports),
        refuted=sum(report.refuted for report in reports),
    )


def _retrieve(asked: asyncio.Future[Any]) -> None:
    """An error of a call that nobody waits for any more is no reason to warn."""
    if not asked.cancelled():
        asked.exception()
