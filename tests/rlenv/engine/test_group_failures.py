"""A group serves on while engines of it die, hang, break or come back with old weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rlenv.engine.base import WeightSender
from rlenv.errors import EngineDeadError, EngineError, WeightUpdateError
from rlenv.types import Completion, Sample
from tests.rlenv.engine.groups import LONG, PROMPT, SOON_S, Sender, all_run, served_by, soon


def test_engine_that_was_not_updated_is_out_and_none_of_its_tokens_pass(group_of: Any, sender: WeightSender) -> None:
    group, (_, second) = group_of(proof_delay=0.05)
    second.refuted = {"1", "1#2"}

    async def scenario() -> list[Completion]:
        futures = [group.submit(PROMPT, Sample(max_tokens=400, ignore_eos=True)) for _ in range(2)]
        early: list[Completion] = []
        update = asyncio.create_task(group.update_weights(sender, 1))
        while not update.done():
            early.append(await group.generate(PROMPT, Sample(max_tokens=2)))
        assert (await update).version == 1
        return early + [await asyncio.wrap_future(future) for future in futures]

    completions = asyncio.run(scenario())
    assert group.weight_version == 1
    assert "'1#2' failed" in group.quarantined[1]
    for completion in completions:
        if "1#1@1" in completion.labels or "1#2@1" in completion.labels:
            with pytest.raises(WeightUpdateError):
                asyncio.run(group.proven(completion.labels))
        else:
            asyncio.run(group.proven(completion.labels))
    assert served_by(group) == {"1#1@0"}
    assert all_run(group)
    assert group.update_weights_sync(sender, 2).version == 2
    assert served_by(group) == {"2#1@0", "2#1@1"}
    assert group.quarantined == {}


@pytest.mark.parametrize("dying", [0, 1])
def test_engine_dead_during_an_update_holds_up_nobody(group_of: Any, sender: WeightSender, dying: int) -> None:
    group, engines = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=100, ignore_eos=True)) for _ in range(6)]
    dies = Sender(sender, **{f"at{dying + 1}": engines[dying].kill})
    assert group.update_weights_sync(dies, 1).version == 1
    assert {len(future.result(SOON_S).token_ids) for future in futures} == {100}
    assert group.weight_version == 1
    assert all_run(group)
    assert group.update_weights_sync(sender, 2).version == 2
    assert {label.partition("@")[2] for label in served_by(group)} == {"0", "1"}


def test_engine_that_hangs_in_an_update_leaves_the_others_generating(group_of: Any, sender: WeightSender) -> None:
    group, (first, _) = group_of()
    first.hangs = "update"
    began = time.monotonic()
    update = group.start(group._update_weights(sender, 1, "keep", True))
    while not update.done():
        assert group.generate_sync(PROMPT, Sample(max_tokens=5)).token_ids
    assert update.result().version == 1
    assert time.monotonic() - began < 3
    assert all_run(group)
    assert group.update_weights_sync(sender, 2).version == 2
    assert served_by(group) == {"2#1@0", "2#1@1"}


def test_death_that_a_request_notices_while_the_trainer_is_busy_is_the_engines(group_of: Any, sender: Any) -> None:
    def killed() -> None:
        first.kill()
        assert soon(lambda: 0 in group.quarantined)

    group, (first, _) = group_of()
    group.submit(PROMPT, Sample(max_tokens=1000, ignore_eos=True))
    assert soon(lambda: first.in_flight == 1)
    assert group.update_weights_sync(Sender(sender, at1=killed), 1).version == 1
    assert group.weight_version == 1


def test_engine_that_the_sender_could_not_reach_is_out_and_the_others_are_updated(
    group_of: Any, sender: WeightSender
) -> None:
    def unreachable() -> None:
        raise EngineError("NCCL did not meet the engine within 20 s")

    group, _ = group_of()
    group.update_weights_sync(Sender(sender, at1=unreachable), 1)
    assert group.weight_version == 1
    assert all_run(group)
    assert served_by(group) <= {"1#1@0", "1#1@1"} and "1#1@1" in served_by(group)


def test_requests_of_an_engine_that_dies_are_answered_by_another(group_of: Any, sender: WeightSender) -> None:
    group, (first, _) = group_of()
    futures = [group.submit(PROMPT, LONG) for _ in range(8)]
    assert soon(lambda: first.in_flight == 4)
    first.kill()
    completions = [future.result(SOON_S) for future in futures]
    assert [completion.finish_reason for completion in completions] == ["length"] * 8
    assert {label for completion in completions for label in completion.labels} == {"0#1@1"}
    assert "died" in group.quarantined[0]
    asyncio.run(group.proven(["0#1@1"]))
    assert all_run(group)
    assert served_by(group) == {"0#1@1"}  # it runs, and has no weights yet
    group.update_weights_sync(sender, 1)
    assert served_by(group) == {"1#1@0", "1#1@1"}


@pytest.mark.parametrize("fault", ["hangs", "breaks"])
def test_engine_that_does_not_pause_is_out_and_the_group_is_paused(group_of: Any, sender: Any, fault: str) -> None:
    group, (first, _) = group_of()
    setattr(first, fault, "pause")
    futures = [group.submit(PROMPT, Sample(max_tokens=400, ignore_eos=True)) for _ in range(4)]

    async def scenario() -> None:
        await asyncio.wait_for(group.pause("keep"), 2)
        assert await group.is_paused()
        await asyncio.sleep(0.2)
        assert not any(future.done() for future in futures)
        await group.resume()

    asyncio.run(scenario())
    assert {len(future.result(SOON_S).token_ids) for future in futures} == {400}
    assert "did not pause" in group.quarantined[0]


def test_engine_that_cannot_pause_for_its_update_holds_up_nobody(group_of: Any, sender: WeightSender) -> None:
    group, (_, second) = group_of()
    second.breaks = "pause"
    assert group.update_weights_sync(sender, 1).version == 1
    assert group.weight_version == 1 and not asyncio.run(group.is_paused())
    assert "1#1@0" in served_by(group)


def test_death_of_the_last_engine_is_the_groups_and_a_restart_serves_again(group_of: Any, sender: Any) -> None:
    group, engines = group_of()
    group.update_weights_sync(sender, 4)
    futures = [group.submit(PROMPT, Sample(max_tokens=1000)) for _ in range(4)]
    for engine in engines:
        engine.kill()
    for future in futures:
        with pytest.raises(EngineDeadError, match="lost its last engine"):
            future.result(SOON_S)
    for call in (lambda: group.submit(PROMPT, LONG), group.pause_sync, lambda: group.update_weights_sync(sender, 5)):
        with pytest.raises(EngineDeadError, match="lost its last engine"):
            call()
    report = group.restart_sync(sender)
    assert (report.version, group.weight_version, group.in_flight, group.quarantined) == (4, 4, 0, {})
    labels = served_by(group)
    assert {label.partition("@")[2] for label in labels} == {"0", "1"}
    asyncio.run(group.proven([*labels, "4#1@0"]))  # what was proven before stays so


def test_restart_starts_again_only_what_does_not_answer(group_of: Any, sender: WeightSender) -> None:
    group, (first, second) = group_of()
    second.kill()
    assert soon(lambda: second._life.death is not None)
    assert group.restart_sync(sender, 2).version == 2
    assert served_by(group) == {"2#1@0", "2#1@1"}
    assert first._life.death is None and len(first.manifests) == 1


def test_engine_that_does_not_start_again_stays_out_until_a_restart_of_the_group(group_of: Any, sender: Any) -> None:
    group, (first, _) = group_of()
    first.breaks = "restart"
    first.kill()
    group.submit(PROMPT, LONG).result(SOON_S)
    assert soon(lambda: "did not start again: cannot restart" in group.quarantined[0])
    group.update_weights_sync(sender, 1)
    assert served_by(group) == {"1#1@1"}
    first.breaks = ""
    group.restart_sync(sender)
    assert served_by(group) == {"1#1@0", "1#2@1"}


def test_engine_that_fails_under_a_pause_for_the_last_requests_is_left_out_of_it(group_of: Any) -> None:
    group, (first, _) = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=200, ignore_eos=True)) for _ in range(4)]
    assert soon(lambda: first.in_flight == 2)
    pause = group.start(group._pause("wait", True))
    assert soon(lambda: first._paused == "wait")
    first.kill()
    pause.result(SOON_S)
    group.resume_sync()
    assert {len(future.result(SOON_S).token_ids) for future in futures} == {200}
    assert "died" in group.quarantined[0]
    assert group._members[0].failures == 1


def test_group_that_cannot_start_any_engine_says_so(group_of: Any, sender: WeightSender) -> None:
    group, engines = group_of()
    for engine in engines:
        engine.breaks = "restart"
        engine.kill()
    assert soon(lambda: all(engine._life.death for engine in engines))
    with pytest.raises(EngineError, match=r"started again.*cannot restart"):
        group.restart_sync(sender)


def test_engine_restarted_with_old_weights_behind_the_group_is_found_out(group_of: Any, sender: Any) -> None:
    group, (first, _) = group_of()
    group.update_weights_sync(sender, 1)
    first._label = "0"
    assert group.generate_sync(PROMPT, LONG).labels == {"1#1@1"}
    assert "serves an older one" in group.quarantined[0]


def test_request_that_ends_every_engine_is_not_given_to_all(group_of: Any) -> None:
    def policy(prompt_ids: Sequence[int], sample: Sample) -> list[int]:
        if sample.seed == 666:
            next(engine for engine in engines if engine._requests).kill()
        return [12] * 100

    group, engines = group_of(5, policy=policy)
    with pytest.raises(EngineDeadError, match="lost with 3 engines"):
        group.generate_sync(PROMPT, Sample(seed=666))
    assert len(served_by(group)) == 2


def test_request_aborted_while_its_engine_fails_comes_back_as_aborted(group_of: Any) -> None:
    group, (first, _) = group_of()
    waiting = group.submit(PROMPT, Sample(max_tokens=1000, ignore_eos=True), request_id="a")
    assert soon(lambda: first.in_flight == 1)

    async def scenario() -> Completion:
        first.hangs = "abort"
        await asyncio.wait_for(group.abort(["a"]), 2)
        return await asyncio.wait_for(asyncio.wrap_future(waiting), 2)

    completion = asyncio.run(scenario())
    assert (completion.request_id, completion.finish_reason, completion.token_ids) == ("a", "abort", ())
    assert "did not abort" in group.quarantined[0]
