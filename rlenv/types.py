"""The plain data that every room shares: what is asked of a policy, what came back, what is trained on.

Nothing here needs torch. Lengths: P prompt ids, T sampled ids, N ids of a whole trajectory row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "abort"]


class Message(TypedDict):
    """One chat message, in the form that every chat template takes."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sample:
    """An action that says: let the shared engine continue the transcript, in this way.

    >>> Sample(temperature=0.0, max_tokens=32)      # greedy, at most 32 ids

    `max_tokens=None` means as many as the context leaves. `top_k=0` means all. With `seed=None` the
    engine draws its own. Log-probabilities always come back: they are those of the distribution that
    was sampled from (after temperature, top-p and top-k). An answer that one of the `stop` strings ends
    keeps it as the end of its text, and every sampled id in its ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Ids `[start, end)` were sampled under the weights labelled `label`.

    A label is a version (`"5"`) or a later attempt at it (`"5#2"`); a group of engines adds the number of the
    engine (`"5#2@1"`). `stale_context` marks ids that were sampled by these weights but attend to keys and values
    which older weights computed.
    """

    label: str
    start: int
    end: int
    stale_context: bool = False

    @property
    def version(self) -> int:
        return version_of(self.label)


def version_of(label: str) -> int:
    """The integer version of a weight label: `"5#2"` → 5."""
    return int(label.partition("#")[0])


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one request, exactly.

    `prompt_ids` [P] are the ids it was given, `token_ids` [T] those it sampled (a sampled end token
    included), `logprobs` [T] their log-probabilities in nats under the sampling distribution. `spans`
    cover [0, T) without gap. `text` is for environments and people, never re-tokenised. An aborted
    request comes back with `finish_reason="abort"` and whatever it had sampled.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: FinishReason

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(span.label for span in self.spans)


@dataclass(frozen=True, slots=True)
class View:
    """What an agent sees when it is asked to act: the transcript so far and the last `info`."""

    messages: tuple[Message, ...]
    turn: int
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode as a training row: exact ids, and which of them the policy sampled.

    `token_ids`, `loss_mask` (True where sampled) and `logprobs` (0.0 where not sampled) have length N;
    `spans` index into that row and cover the sampled ids only.

    >>> # prompt 7 8, sampled 3 2, environment 9, sampled 4 2
    >>> # token_ids 7 8 3 2 9 4 2 · loss_mask 0 0 1 1 0 1 1 · spans [("0", 2, 4), ("1", 5, 7)]
    """

    task: str
    seed: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    messages: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    turns: int
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(span.label for span in self.spans)

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that has no reward, and why: it is counted by `cause`, never trained on as a 0.

    `messages` is the transcript up to and with the answer on which it failed.
    """

    task: str
    seed: int
    cause: str
    message: str
    messages: tuple[Message, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task at one seed, which share a baseline; `failures` are not part of it."""

    id: int
    task: str
    seed: int
    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...] = ()
