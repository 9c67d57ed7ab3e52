"""Scored trajectories enter; one unpadded `Batch` leaves, and from it padded micro-batches of a token budget.

Legend: R rows, N ids of all rows together, B rows of a micro-batch, T its longest row, L live tokens
(those with a loss, which are exactly those that the policy sampled). No mask is ever derived from an id:
a padding id may be any real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlenv.agents.advantages import Scored
from rlenv.errors import ConfigError, GroupError
from rlenv.types import Sample, Trajectory

PAD_ID = 0  # never read: masks come from lengths

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one policy update is computed from: rows laid end to end, row r at `offsets[r] : offsets[r + 1]`.

    Per id [N]: `token_ids`; `live` (sampled by the policy, so it has a loss); `behaviour`, its log-prob in
    nats under the distribution it was sampled from; `staleness`, how many versions older than `version`
    the weights were that sampled it; `stale_context`, whether it attends to keys and values of older
    weights; `sampling` [N, 3], the temperature, top-p and top-k (0: all) it was drawn with. The last four say
    nothing where `live` is False.
    Per row [R]: `advantages`. `offsets` is [R + 1].

    `live_tokens` normalises the loss. It is that of the whole batch and survives `select` and `shard`, so
    that neither the split into micro-batches nor that into ranks changes the gradient.
    `zero_std_fraction` is the share of groups whose rewards were all equal.

    >>> # rows 7 8 3 2 (sampled 3 2) and 7 5 (sampled 5)
    >>> # token_ids 7 8 3 2 7 5 · live 0 0 1 1 0 1 · offsets 0 4 6 · live_tokens 3
    """

    version: int
    token_ids: IntArray
    live: BoolArray
    behaviour: FloatArray
    staleness: IntArray
    stale_context: BoolArray
    sampling: FloatArray
    offsets: IntArray
    advantages: FloatArray
    live_tokens: int
    zero_std_fraction: float

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    def select(self, rows: Sequence[int]) -> Batch:
        """These rows alone; `live_tokens` stays that of the whole batch."""
        ids = np.concatenate([np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])
        chosen = np.asarray(rows)
        return replace(
            self,
            token_ids=self.token_ids[ids],
            live=self.live[ids],
            behaviour=self.behaviour[ids],
            staleness=self.staleness[ids],
            stale_context=self.stale_context[ids],
            sampling=self.sampling[ids],
            offsets=_offsets(self.lengths[chosen]),
            advantages=self.advantages[chosen],
        )

    def shard(self, rank: int, ranks: int) -> Batch:
        """The rows of one rank, dealt out by length so that all have like work."""
        return self if ranks == 1 else self.select(np.argsort(-self.lengths, kind="stable")[rank::ranks].tolist())

    def minibatches(self, count: int, seed: int) -> list[Batch]:
        """At most `count` parts of equal size in a seeded order, each a batch with `live_tokens` of its own.

        Every rank makes the same parts of the whole batch, and then takes its shard of each.
        """
        if count == 1:
            return [self]
        order = np.random.default_rng(seed).permutation(self.rows)
        parts = [self.select(np.sort(rows).tolist()) for rows in np.array_split(order, min(count, self.rows))]
        return [replace(part, live_tokens=int(part.live.sum())) for part in parts]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of like length, padded on the right to [B, T]; what is per live token is flat [L], row by row.

    `token_ids` [B, T], `attention_mask` [B, T] (False on padding), `live` [B, T] (never at t = 0: the first
    id is predicted from nothing); `behaviour`, `advantages`, `staleness`, `stale_context` [L] and
    `sampling` [L, 3]. `rows` [B] are the rows' numbers in the batch.
    """

    rows: IntArray
    token_ids: IntArray
    attention_mask: BoolArray
    live: BoolArray
    behaviour: FloatArray
    advantages: FloatArray
    staleness: IntArray
    stale_context: BoolArray
    sampling: FloatArray


def pack(scored: Scored, *, version: int) -> Batch:
    """Lay the rows end to end, for an update of the weights that carry `version`.

    Each row ends at its last sampled id, as nothing behind it can have a loss; a row without any is left
    out. How each turn was sampled is read from the trajectory's `info["samples"]`; without them it is
    `Sample()`. Raises GroupError when no row is left, ConfigError when rows were sampled in a way that has
    no gradient or that the learner cannot reproduce, ValueError when a sampled id has no finite log-prob.
    """
    rows = [
        (_cut(trajectory), advantage)
        for trajectory, advantage in zip(scored.trajectories, scored.advantages, strict=True)
        if any(trajectory.loss_mask)
    ]
    if not rows:
        raise GroupError(
            f"nothing to train on: {scored.failed_groups} groups without a survivor, {scored.lone_survivors} with "
            f"one, {len(scored.trajectories)} trajectories without a sampled token; failures {dict(scored.failures)}"
        )
    staleness, stale_context = zip(*(_ages(trajectory, version) for trajectory, _ in rows), strict=True)
    live = np.concatenate([np.asarray(trajectory.loss_mask, dtype=bool) for trajectory, _ in rows])
    return Batch(
        version=version,
        token_ids=np.concatenate([np.asarray(trajectory.token_ids, dtype=np.int64) for trajectory, _ in rows]),
        live=live,
        behaviour=np.concatenate([np.asarray(trajectory.logprobs, dtype=np.float32) for trajectory, _ in rows]),
        staleness=np.concatenate(staleness),
        stale_context=np.concatenate(stale_context),
        sampling=np.concatenate([_sampling(trajectory) for trajectory, _ in rows]),
        offsets=_offsets([len(trajectory.token_ids) for trajectory, _ in rows]),
        advantages=np.asarray([advantage for _, advantage in rows], dtype=np.float32),
        live_tokens=int(live.sum()),
        zero_std_fraction=scored.zero_std_groups / scored.groups,
    )


def rows_to_score(sequences: Sequence[Sequence[int]]) -> Batch:
    """A batch whose every id but the first of each sequence is live: log-probs are asked for, not a loss."""
    lengths = [len(sequence) for sequence in sequences]
    total, offsets = sum(lengths), _offsets(lengths)
    live = np.ones(total, dtype=bool)
    live[offsets[:-1]] = False
    return Batch(
        version=0,
        token_ids=np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences]),
        live=live,
        behaviour=np.zeros(total, dtype=np.float32),
        staleness=np.zeros(total, dtype=np.int64),
        stale_context=np.zeros(total, dtype=bool),
        sampling=np.tile(_columns(Sample()), (total, 1)),
        offsets=offsets,
        advantages=np.zeros(len(lengths), dtype=np.float32),
        live_tokens=int(live.sum()),
        zero_std_fraction=0.0,
    )


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[MicroBatch]:
    """Split into micro-batches of at most `max_tokens` padded ids, longest rows first; a longer row goes alone."""
    order = np.argsort(-batch.lengths, kind="stable")
    start = 0
    while start < len(order):
        width = int(batch.lengths[order[start]])
        rows = order[start : start + max(1, max_tokens // width)]
        yield _pad(batch, rows, width)
        start += len(rows)


def _cut(trajectory: Trajectory) -> Trajectory:
    where = f"task {trajectory.task!r}, seed {trajectory.seed}"
    mask = np.asarray(trajectory.loss_mask, dtype=bool)
    if mask[0]:
        raise ValueError(f"{where}: the first id is marked as sampled; a row starts with a prompt")
    if not np.isfinite(np.asarray(trajectory.logprobs)[mask]).all():
        raise ValueError(f"{where}: a sampled id has no finite log-prob")
    end = int(np.flatnonzero(mask)[-1]) + 1
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[:end],
        loss_mask=trajectory.loss_mask[:end],
        logprobs=trajectory.logprobs[:end],
    )


def _ages(trajectory: Trajectory, version: int) -> tuple[IntArray, BoolArray]:
    """`staleness` and `stale_context` [length of the row], from its version spans."""
    staleness = np.zeros(len(trajectory.token_ids), dtype=np.int64)
    stale_context = np.zeros(len(trajectory.token_ids), dtype=bool)
    for span in trajectory.spans:
        if span.version > version:
            raise ValueError(f"ids sampled by version {span.version} cannot train version {version}: it is older")
        staleness[span.start : span.end] = version - span.version
        stale_context[span.start : span.end] = span.stale_context
    return staleness, stale_context


def _sampling(trajectory: Trajectory) -> FloatArray:
    """`sampling` [length of the row, 3]. Turns are the runs of sampled ids, which text of the environment parts."""
    where = f"task {trajectory.task!r}, seed {trajectory.seed}"
    samples = [_trainable(sample, where) for sample in trajectory.info.get("samples", ())] or [Sample()]
    asked = [_columns(sample) for sample in samples]
    if all(np.array_equal(columns, asked[0]) for columns in asked):
        return np.tile(asked[0], (len(trajectory.token_ids), 1))
    mask = np.asarray(trajectory.loss_mask, dtype=bool)
    turn = np.cumsum(mask & ~np.concatenate([[False], mask[:-1]]))  # 1 in the first run of sampled ids
    if turn[-1] != len(samples):
        raise ConfigError(
            f"{where}: {len(samples)} samples of different temperature, top_p or top_k, but {turn[-1]} sampled turns: "
            "which is which cannot be told; sample every turn of an episode alike"
        )
    return np.stack(asked)[np.maximum(turn, 1) - 1]


def _trainable(sample: Sample, where: str) -> Sample:
    if not sample.temperature > 0:
        raise ConfigError(
            f"{where}: temperature {sample.temperature} cannot be trained on; sample with temperature > 0, e.g. 1.0"
        )
    if sample.min_tokens > 0:
        raise ConfigError(
            f"{where}: min_tokens {sample.min_tokens} takes end tokens out of what is sampled, which the learner's "
            "log-probs do not; leave it at 0 where you train"
        )
    return sample


def _columns(sample: Sample) -> FloatArray:
    return np.asarray([sample.temperature, sample.top_p, sample.top_k], dtype=np.float32)


def _pad(batch: Batch, rows: IntArray, width: int) -> MicroBatch:
    columns = np.arange(width)
    attention_mask = columns < batch.lengths[rows, None]  # [B, T]
    source = np.where(attention_mask, batch.offsets[rows, None] + columns, 0)  # [B, T] into [N]
    live = attention_mask & batch.live[source]
    chosen = source[live]  # [L] into [N]
    return MicroBatch(
        rows=rows,
        token_ids=np.where(attention_mask, batch.token_ids[source], PAD_ID),
        attention_mask=attention_mask,
        live=live,
        behaviour=batch.behaviour[chosen],
        advantages=np.repeat(batch.advantages[rows], live.sum(axis=1)),
        staleness=batch.staleness[chosen],
        stale_context=batch.stale_context[chosen],
        sampling=batch.sampling[chosen],
    )


def _offsets(lengths: Sequence[int] | IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
