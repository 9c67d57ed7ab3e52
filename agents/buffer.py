"""Groups in, training batches out: holds finished groups until they are proven, and drops what is too old.

Legend: B groups make a batch, `version` is the learner's (its count of optimizer steps), η the staleness bound.

Admission: of the groups admitted and not dropped, number g is consumed at version g // B at the earliest. At
version v a rollout may therefore start only while fewer than (v + η + 1) · B are admitted; with η = 0 that is
exactly one batch a version. What waits, finished or not, never exceeds (η + 1) · B, which is the back-pressure.
Nothing is started that the last batch would leave over.

A group without signal (all its rewards equal) may be dropped, so that another takes its place: the dynamic sampling
of DAPO (arXiv 2503.14476, section 3.2). A task that gives no other groups would be sampled for ever, so that many in
a row end the run.

Consumption: a group may still be overtaken while it is slow, so each is measured again when it is taken. Its lag
is the version that consumes it minus the oldest version that sampled any of its ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from rlenv.agents.advantages import are_equal
from rlenv.errors import GroupError, WeightUpdateError
from rlenv.types import Group

Prove = Callable[[Iterable[str]], Awaitable[None]]
# Constant groups in a row that are resampled before a task is given up: so many batches, and so many groups at least.
MOST_CONSTANT_BATCHES, MOST_CONSTANT_GROUPS = 10, 100


class GroupBuffer:
    """A bounded buffer between one producer and one consumer on the same event loop.

    `prove` waits until every label it is given is proven (`Engine.proven`). `dropped` counts groups by cause:
    `"stale"`, `"unproven"`, `"too few survivors"` and, with `resample_constant`, `"constant"`.
    """

    def __init__(
        self, batches: int, batch_groups: int, staleness: int, prove: Prove, *, resample_constant: bool = False
    ) -> None:
        self.batches, self.batch_groups, self.staleness = batches, batch_groups, staleness
        self.resample_constant = resample_constant
        self.version = 0
        self.dropped: Counter[str] = Counter()
        self._prove = prove
        self._constant: list[float] = []  # the rewards of constant groups since the last other one
        self._admitted = 0
        self._consumed = 0
        self._running = 0
        self._ready: list[Group] = []
        self._changed = asyncio.Condition()

    @property
    def waiting(self) -> int:
        """Groups that are proven and not yet consumed."""
        return len(self._ready)

    @property
    def outstanding(self) -> int:
        """Groups that were admitted and are neither consumed nor dropped."""
        return self._admitted - self._consumed

    async def admit(self) -> int:
        """Wait until one more rollout may start; returns the version it starts under."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._room() > 0)
            self._admitted += 1
            self._running += 1
            return self.version

    async def put(self, group: Group) -> None:
        """Take in an admitted group once all its spans are proven; one without a baseline or a proof is dropped.

        Raises GroupError when constant groups are resampled and nearly all there are.
        """
        cause = self._useless(group)
        if cause is None:
            try:
                await self._prove({label for row in group.trajectories for label in row.labels})
            except WeightUpdateError:
                cause = "unproven"
        async with self._changed:
            self._running -= 1
            if cause is None:
                self._ready.append(group)
            else:
                self._drop(cause)
            self._changed.notify_all()

    async def take(self) -> list[Group]:
        """Wait for B groups whose lag is within η, the oldest first. Older ones are dropped and counted."""
        async with self._changed:
            await self._changed.wait_for(self._batch_is_ready)
            self._ready.sort(key=lambda group: (oldest_version(group), group.id))
            batch, self._ready = self._ready[: self.batch_groups], self._ready[self.batch_groups :]
            self._consumed += len(batch)
            return batch

    async def advance(self, version: int) -> None:
        """The engine serves `version` now: rollouts may start under it."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until no admitted rollout is running."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == 0)

    def lag(self, group: Group) -> int:
        """How many versions a group is behind if it is consumed now."""
        return self.version - oldest_version(group)

    def _useless(self, group: Group) -> str | None:
        """Why a group has nothing to train on, whatever weights sampled it."""
        if len(group.trajectories) < 2:
            return "too few survivors"
        rewards = [row.reward for row in group.trajectories]
        if not self.resample_constant or not are_equal(rewards):
            self._constant.clear()
            return None
        self._constant.append(rewards[0])
        self._stop_if_all_are_constant(group.task)
        return "constant"

    def _stop_if_all_are_constant(self, task: str) -> None:
        if len(self._constant) < max(MOST_CONSTANT_BATCHES * self.batch_groups, MOST_CONSTANT_GROUPS):
            return
        (reward, count), *_ = Counter(self._constant).most_common(1)
        raise GroupError(
            f"{len(self._constant)} groups of {task!r} in a row had equal rewards, {count} of them {reward:g} "
            "throughout: there is nothing to resample. Choose an easier or harder task, a larger --group-size or "
            "a higher --temperature, or type --constant-groups keep"
        )

    def _room(self) -> int:
        batches = min(self.version + self.staleness + 1, self.batches)
        return batches * self.batch_groups - self._admitted

    def _batch_is_ready(self) -> bool:
        fresh = [group for group in self._ready if self.lag(group) <= self.staleness]
        for _ in range(len(self._ready) - len(fresh)):
            self._drop("stale")
        if len(fresh) < len(self._ready):
            self._ready = fresh
            self._changed.notify_all()
        return len(fresh) >= self.batch_groups

    def _drop(self, cause: str) -> None:
        self.dropped[cause] += 1
        self._admitted -= 1


def oldest_version(group: Group) -> int:
    """The oldest version that sampled any id of any trajectory of this group."""
    return min(row.oldest_version for row in group.trajectories)
