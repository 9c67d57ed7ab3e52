"""The buffer: what may start, what may be trained on, and what is dropped, with the count of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlenv.agents.buffer import GroupBuffer, oldest_version
from rlenv.errors import WeightUpdateError
from rlenv.types import Group, Trajectory, VersionSpan


async def at_once(labels: Iterable[str]) -> None:
    """Every label is proven."""


def trajectory(*labels: str) -> Trajectory:
    spans = tuple(VersionSpan(label, i, i + 1) for i, label in enumerate(labels))
    n = len(labels)
    return Trajectory("t", 0, (1,) * n, (True,) * n, (0.0,) * n, spans, (), 1.0, True, False, 1)


def group(id: int, *labels: str, size: int = 2) -> Group:
    return Group(id, "t", id, (trajectory(*labels),) * size)


async def blocks(coroutine) -> bool:
    try:
        await asyncio.wait_for(coroutine, 0.02)
    except TimeoutError:
        return True
    return False


def test_admission_allows_one_batch_per_version_within_the_bound() -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=10_000, batch_groups=3, staleness=1, prove=at_once)
        for _ in range(6):
            assert await buffer.admit() == 0
        assert await blocks(buffer.admit())
        await buffer.advance(1)
        for _ in range(3):
            assert await buffer.admit() == 1
        assert await blocks(buffer.admit())

    asyncio.run(body())


def test_a_bound_of_zero_still_makes_progress() -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=10_000, batch_groups=2, staleness=0, prove=at_once)
        for version in range(5):
            for i in range(2):
                await buffer.admit()
                await buffer.put(group(i, str(version)))
            assert [buffer.lag(g) for g in await buffer.take()] == [0, 0]
            assert await blocks(buffer.admit())
            await buffer.advance(version + 1)
        assert not buffer.dropped

    asyncio.run(body())


def test_nothing_starts_that_the_last_batch_would_leave_over() -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=2, batch_groups=3, staleness=5, prove=at_once)
        for _ in range(6):
            await buffer.admit()
        assert await blocks(buffer.admit())

    asyncio.run(body())


def test_lag_counts_from_the_oldest_span_of_the_oldest_trajectory() -> None:
    mixed = Group(0, "t", 0, (trajectory("4", "5"), trajectory("3#2", "5")))
    assert oldest_version(mixed) == 3


def test_a_group_that_got_too_old_is_dropped_counted_and_replaced() -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=10_000, batch_groups=1, staleness=1, prove=at_once)
        await buffer.admit()
        await buffer.admit()
        await buffer.put(group(0, "0"))
        await buffer.take()
        await buffer.advance(1)
        await buffer.advance(2)
        await buffer.put(group(1, "0", "2"))
        assert await blocks(buffer.take())
        assert buffer.dropped == {"stale": 1} and buffer.waiting == 0
        await buffer.admit()
        await buffer.put(group(2, "2"))
        assert [g.id for g in await buffer.take()] == [2]

    asyncio.run(body())


def test_the_oldest_group_is_consumed_first() -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=10_000, batch_groups=1, staleness=3, prove=at_once)
        await buffer.advance(2)
        for g in (group(0, "2"), group(1, "1"), group(2, "1")):
            await buffer.admit()
            await buffer.put(g)
        assert [(await buffer.take())[0].id for _ in range(3)] == [1, 2, 0]

    asyncio.run(body())


def test_a_group_is_not_eligible_before_all_its_labels_are_proven() -> None:
    async def body() -> None:
        proof, asked = asyncio.Event(), []

        async def prove(labels: Iterable[str]) -> None:
            asked.append(set(labels))
            await proof.wait()

        buffer = GroupBuffer(batches=10_000, batch_groups=1, staleness=5, prove=prove)
        await buffer.advance(2)
        await buffer.admit()
        put = asyncio.create_task(buffer.put(group(0, "1", "2")))
        assert await blocks(buffer.take())
        proof.set()
        await put
        assert [g.id for g in await buffer.take()] == [0]
        assert asked == [{"1", "2"}]

    asyncio.run(body())


def test_a_refuted_group_is_dropped_and_its_place_given_away() -> None:
    async def body() -> None:
        async def refuse(labels: Iterable[str]) -> None:
            raise WeightUpdateError("no", version=1, what="canary", size=1.0)

        buffer = GroupBuffer(batches=10_000, batch_groups=1, staleness=0, prove=refuse)
        await buffer.admit()
        await buffer.put(group(0, "0"))
        assert buffer.dropped == {"unproven": 1}
        assert not await blocks(buffer.admit())

    asyncio.run(body())


@pytest.mark.parametrize("size", [0, 1])
def test_a_group_without_a_baseline_is_dropped_and_counted(size: int) -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=10_000, batch_groups=1, staleness=0, prove=at_once)
        await buffer.admit()
        await buffer.put(group(0, "0", size=size))
        assert buffer.dropped == {"too few survivors": 1} and buffer.outstanding == 0

    asyncio.run(body())


def test_finished_groups_never_exceed_the_bound_while_the_consumer_sleeps() -> None:
    async def body() -> None:
        buffer = GroupBuffer(batches=10_000, batch_groups=4, staleness=2, prove=at_once)

        async def produce() -> None:
            for i in range(2000):
                await buffer.admit()
                await buffer.put(group(i, str(buffer.version)))

        producer = asyncio.create_task(produce())
        await asyncio.sleep(0.02)
        assert buffer.waiting == buffer.outstanding == 12
        for version in range(1, 200):
            await buffer.take()
            await buffer.advance(version)
            await asyncio.sleep(0)
            assert buffer.waiting <= buffer.outstanding <= 12
        producer.cancel()

    asyncio.run(body())


@settings(max_examples=60, deadline=None)
@given(
    staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    delays=st.lists(st.integers(0, 12), min_size=1, max_size=30),
)
def test_no_schedule_of_slow_rollouts_consumes_a_group_over_the_bound(
    staleness: int, batch: int, delays: list[int]
) -> None:
    """Rollouts last `delays` ticks of a virtual clock; whatever the order, each consumed lag is within the bound."""

    async def body() -> None:
        buffer = GroupBuffer(12, batch, staleness, at_once)
        lags: list[int] = []

        async def roll(id: int, version: int) -> None:
            for _ in range(delays[id % len(delays)]):
                await asyncio.sleep(0)
            await buffer.put(group(id, str(version), str(buffer.version)))

        async def produce() -> None:
            async with asyncio.TaskGroup() as rollouts:
                for id in range(10_000):
                    rollouts.create_task(roll(id, await buffer.admit()))

        producer = asyncio.create_task(produce())
        for version in range(1, 13):
            lags += [buffer.lag(g) for g in await buffer.take()]
            await buffer.advance(version)
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        assert len(lags) == 12 * batch and max(lags) <= staleness

    asyncio.run(body())
