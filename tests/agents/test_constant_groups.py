"""Groups of equal rewards: kept at advantage 0, filtered out of the batch, or replaced by others, as is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

import pytest
from fakes import FakeLearner

from rlenv.agents.advantages import score
from rlenv.agents.buffer import MOST_CONSTANT_GROUPS, GroupBuffer
from rlenv.agents.config import TrainConfig
from rlenv.agents.loop import TrainLoop
from rlenv.agents.tally import StepRow
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import ConfigError, GroupError
from rlenv.types import Failure, Group, Trajectory, VersionSpan

Start = Callable[..., ScriptedEngine]
ROW = ((1, 2, 3), (False, True, True), (0.0, -0.5, -0.5))


def group(id: int, *rewards: float, failures: int = 0, label: str = "0") -> Group:
    rows = (Trajectory("t", id, *ROW, (VersionSpan(label, 1, 3),), (), reward, True, False, 1) for reward in rewards)
    return Group(id, "t", id, tuple(rows), (Failure("t", id, "timeout", ""),) * failures)


async def at_once(labels: Iterable[str]) -> None:
    """Every label is proven."""


async def put_all(buffer: GroupBuffer, groups: Iterable[Group]) -> None:
    for one in groups:
        await buffer.admit()
        await buffer.put(one)


def test_resampling_drops_counts_and_replaces_groups_without_signal() -> None:
    async def body() -> None:
        buffer = GroupBuffer(10, 2, 0, at_once, resample_constant=True)
        mixed, equal = group(3, 0.0, 1.0), [group(0, 0.0, 0.0), group(1, 1.0, 1.0), group(2, 0.3, 0.1 + 0.2)]
        await put_all(buffer, [*equal, mixed, *equal, group(9, 1.0, 0.0)])
        assert [one.id for one in await buffer.take()] == [3, 9]
        assert buffer.dropped == {"constant": 6}

    asyncio.run(body())


def test_groups_are_equal_or_not_by_their_survivors_alone() -> None:
    async def body() -> None:
        buffer = GroupBuffer(10, 1, 0, at_once, resample_constant=True)
        await put_all(buffer, [group(0, 1.0, failures=3), group(1, 1.0, 1.0, failures=2)])
        assert buffer.dropped == {"too few survivors": 1, "constant": 1}

    asyncio.run(body())


def test_what_is_dropped_for_want_of_signal_waits_for_no_proof() -> None:
    async def never(labels: Iterable[str]) -> None:
        raise AssertionError("asked for a proof")

    buffer = GroupBuffer(10, 1, 0, never, resample_constant=True)
    asyncio.run(put_all(buffer, [group(0, 1.0, 1.0)]))


def test_a_task_without_any_signal_is_given_up_with_advice() -> None:
    buffer = GroupBuffer(10, 4, 0, at_once, resample_constant=True)
    with pytest.raises(GroupError, match=r"100 groups of 't' in a row .* 0 throughout.*--constant-groups keep"):
        asyncio.run(put_all(buffer, (group(id, 0.0, 0.0) for id in range(1000))))
    assert buffer.dropped["constant"] <= MOST_CONSTANT_GROUPS


def test_a_rare_group_with_signal_starts_the_count_anew() -> None:
    async def body() -> None:
        buffer = GroupBuffer(10, 4, 0, at_once, resample_constant=True)
        rare = (group(id, 0.0, float(id % 99 == 98)) for id in range(4 * 99))
        await put_all(buffer, rare)
        assert len(await buffer.take()) == 4

    asyncio.run(body())


def test_filtering_leaves_them_out_of_the_rows_and_keeps_their_count() -> None:
    groups = [group(0, 1.0, 1.0), group(1, 0.0, 1.0)]
    kept, filtered = score(groups), score(groups, filter_constant=True)
    assert kept.advantages == (0.0, 0.0, -1.0, 1.0) and filtered.advantages == (-1.0, 1.0)
    assert [row.seed for row in filtered.trajectories] == [1, 1]
    assert (filtered.groups, filtered.zero_std_groups) == (kept.groups, kept.zero_std_groups) == (2, 1)


def test_a_batch_of_nothing_else_is_kept_so_that_a_step_without_gradient_follows() -> None:
    assert score([group(0, 1.0, 1.0)], filter_constant=True) == score([group(0, 1.0, 1.0)])


def run_loop(engine: ScriptedEngine, rewards: Iterator[tuple[float, float]], choice: str) -> tuple[TrainLoop, list]:
    learner, rows = FakeLearner(), list[StepRow]()

    async def rollout(id: int, seed: int) -> Group:
        await asyncio.sleep(0)
        return group(id, *next(rewards), label=str(engine.weight_version))

    config = TrainConfig("t", steps=4, groups_per_step=3, group_size=2, staleness=0, constant_groups=choice)
    loop = TrainLoop(engine, learner, rollout, config, rows.append)
    asyncio.run(loop.run())
    return loop, [batch.advantages.tolist() for batch in learner.batches]


def alternating() -> Iterator[tuple[float, float]]:
    while True:
        yield from [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("choice", "rows", "constant", "dropped"), [("keep", 6, 8, 0), ("filter", 2, 8, 0), ("resample", 6, 0, None)]
)
def test_a_run_trains_on_what_was_chosen(
    scripted: Start, choice: str, rows: int, constant: int, dropped: int | None
) -> None:
    loop, batches = run_loop(scripted(lambda p, s: "a"), alternating(), choice)
    summary = loop.tally.summary()
    assert [len(advantages) for advantages in batches] == [rows] * 4
    assert all(any(advantages) for advantages in batches)
    assert summary["constant_groups"] == constant
    assert summary["dropped_constant"] == dropped or (dropped is None and summary["dropped_constant"] >= 20)


def test_a_run_that_resamples_ends_when_the_task_gives_no_signal(scripted: Start) -> None:
    with pytest.raises(GroupError, match="nothing to resample"):
        run_loop(scripted(lambda p, s: "a"), iter([(1.0, 1.0)] * 1000), "resample")


def test_an_unknown_choice_names_the_known() -> None:
    with pytest.raises(ConfigError, match="--constant-groups with one of keep, filter, resample"):
        TrainConfig("t", constant_groups="drop")
