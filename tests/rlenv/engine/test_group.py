"""A group serves on while one of its engines fails, and no token passes whose weights were not proven and committed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from rlenv.engine.base import Engine, Manifest, PauseMode, UpdateReport, WeightSender, WeightSyncClient
from rlenv.engine.group import EngineGroup
from rlenv.engine.members import label_in_group
from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import ConfigError, EngineDeadError, EngineError, WeightUpdateError
from rlenv.types import Completion, Sample, version_of

PROMPT = [10, 11]
LONG = Sample(max_tokens=60, ignore_eos=True)
SOON_S = 5.0


class Failing(ScriptedEngine):
    """A scripted engine whose `hangs` and `breaks` name what does not end or raises."""

    hangs = breaks = ""

    async def _fault(self, what: str) -> None:
        if self.breaks == what:
            raise OSError(f"cannot {what}")
        if self.hangs == what:
            await asyncio.Event().wait()

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._fault("pause")
        await super()._pause(mode, clear_cache)

    async def _update_weights(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport:
        await self._fault("update")
        return await super()._update_weights(sender, version, mode, clear_cache)

    async def _start_again(self) -> None:
        await self._fault("restart")
        self.hangs = self.breaks = ""
        await super()._start_again()


class Sender:
    """A sender that runs `before[n]` before its n-th transfer."""

    def __init__(self, sender: WeightSender, **before: Callable[[], None]) -> None:
        self._sender, self._before, self._sent = sender, before, 0
        self.logprobs = sender.logprobs

    def send(self, client: WeightSyncClient) -> Manifest:
        self._sent += 1
        self._before.get(f"at{self._sent}", lambda: None)()
        return self._sender.send(client)


@pytest.fixture
def group_of(char_tokenizer: Any) -> Iterator[Callable[..., tuple[EngineGroup, list[Failing]]]]:
    """`group_of(n, **options)` starts n engines, 2 ms a token, and a group of them, and closes it."""
    groups: list[EngineGroup] = []

    def start(number: int = 2, *, policy: Any = None, update_s: float = 0.5, **options: Any) -> Any:
        policy = policy or (lambda prompt_ids, sample: list(range(10, 36)) * 40)
        settings = {"delay": 0.002, "max_model_len": 2048} | options
        engines = [Failing(char_tokenizer, policy, **settings) for _ in range(number)]
        groups.append(EngineGroup(engines, answer_s=0.3, update_s=update_s))
        return groups[-1], engines

    yield start
    for group in groups:
        group.close()


def test_group_is_of_one_model_at_one_version(scripted: Any, sender: WeightSender) -> None:
    policy = lambda prompt_ids, sample: "a"  # noqa: E731
    with pytest.raises(ConfigError, match="one model, not none"):
        EngineGroup([])
    with pytest.raises(ConfigError, match=r"one model, not \['large', 'small'\]"):
        EngineGroup([scripted(policy, model="small"), scripted(policy, model="large")])
    updated = scripted(policy)
    updated.update_weights_sync(sender, 3)
    with pytest.raises(ConfigError, match=r"one weight version, not \[0, 3\]"):
        EngineGroup([scripted(policy), updated])


def test_shortest_context_of_the_engines_is_the_groups(scripted: Any) -> None:
    with EngineGroup([scripted(lambda p, s: "a", max_model_len=limit) for limit in (64, 32)]) as group:
        assert group.max_model_len == 32


def test_requests_go_where_the_fewest_tokens_are_outstanding(group_of: Any) -> None:
    group, engines = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=n, ignore_eos=True)) for n in (200, 50, 50, 50)]
    assert _soon(lambda: [engine.in_flight for engine in engines] == [1, 3])
    assert [len(future.result(SOON_S).token_ids) for future in futures] == [200, 50, 50, 50]


def test_labels_name_the_engine_and_keep_the_version() -> None:
    assert [label_in_group(label, 1) for label in ("5", "5#2")] == ["5#1@1", "5#2@1"]
    assert version_of("5#2@1") == 5


def test_verdict_on_a_label_is_that_of_the_engine_which_served_it(group_of: Any, sender: WeightSender) -> None:
    group, (_, second) = group_of(proof_delay=0.05)
    second.refuted = {"1"}

    async def scenario() -> tuple[UpdateReport, set[str]]:
        futures = [group.submit(PROMPT, Sample(max_tokens=300, ignore_eos=True)) for _ in range(2)]
        await asyncio.sleep(0.1)
        report = await group.update_weights(sender, 1)
        return report, {label for f in futures for label in (await asyncio.wrap_future(f)).labels}

    report, labels = asyncio.run(scenario())
    assert labels == {"0#1@0", "1#1@0", "0#1@1", "1#1@1", "1#2@1"}
    assert (report.label, report.refuted, group.weight_version, group.quarantined) == ("1", 1, 1, {})
    asyncio.run(group.proven(labels - {"1#1@1"}))
    with pytest.raises(WeightUpdateError, match="'1' that were refuted"):
        asyncio.run(group.proven(["1#1@1"]))


def test_version_counts_and_is_proven_once_all_have_proven_it(group_of: Any, sender: WeightSender) -> None:
    def between() -> None:
        labels = group.generate_sync(PROMPT, Sample(max_tokens=2)).labels
        assert labels == {"1#1@0"}
        waiting.append(group.start(group._proven(labels)))
        time.sleep(0.05)
        assert (group.weight_version, waiting[0].done()) == (0, False)

    waiting: list[Future[None]] = []
    group, _ = group_of()
    group.update_weights_sync(Sender(sender, at2=between), 1)
    waiting[0].result(SOON_S)
    assert group.weight_version == 1


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
    assert _served_by(group) == {"1#1@0"}
    assert _all_run(group)
    assert group.update_weights_sync(sender, 2).version == 2
    assert _served_by(group) == {"2#1@0", "2#1@1"}
    assert group.quarantined == {}


def test_update_that_every_engine_refuses_is_an_error_and_the_next_one_heals(group_of: Any, sender: Any) -> None:
    group, engines = group_of()
    for engine in engines:
        engine.refuted = {"1", "1#2"}
    with pytest.raises(WeightUpdateError, match="version 1"):
        group.update_weights_sync(sender, 1)
    assert (group.weight_version, asyncio.run(group.is_paused()), group.quarantined) == (0, False, {})
    assert group.update_weights_sync(sender, 1).label == "1"
    assert _served_by(group) == {"1#3@0", "1#3@1"}


@pytest.mark.parametrize("dying", [0, 1])
def test_engine_dead_during_an_update_holds_up_nobody(group_of: Any, sender: WeightSender, dying: int) -> None:
    group, engines = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=100, ignore_eos=True)) for _ in range(6)]
    dies = Sender(sender, **{f"at{dying + 1}": engines[dying].kill})
    assert group.update_weights_sync(dies, 1).version == 1
    assert {len(future.result(SOON_S).token_ids) for future in futures} == {100}
    assert group.weight_version == 1
    assert _all_run(group)
    assert group.update_weights_sync(sender, 2).version == 2
    assert {label.partition("@")[2] for label in _served_by(group)} == {"0", "1"}


def test_engine_that_hangs_in_an_update_leaves_the_others_generating(group_of: Any, sender: WeightSender) -> None:
    group, (first, _) = group_of()
    first.hangs = "update"
    began = time.monotonic()
    update = group.start(group._update_weights(sender, 1, "keep", True))
    while not update.done():
        assert group.generate_sync(PROMPT, Sample(max_tokens=5)).token_ids
    assert update.result().version == 1
    assert time.monotonic() - began < 3
    assert _all_run(group)
    assert group.update_weights_sync(sender, 2).version == 2
    assert _served_by(group) == {"2#1@0", "2#1@1"}


def test_trainer_that_hangs_is_told_from_an_engine_that_does_and_reaches_it_no_more(group_of: Any, sender: Any) -> None:
    late, refused = threading.Event(), threading.Event()

    class Late:
        logprobs = sender.logprobs

        def send(self, client: WeightSyncClient) -> Manifest:
            late.wait(SOON_S)
            with pytest.raises(EngineError, match="given up"):
                client.start_weight_update()
            refused.set()
            return {}

    group, (first, _) = group_of()
    with pytest.raises(WeightUpdateError, match=r"the sender took over 0\.5 s"):
        group.update_weights_sync(Late(), 1)
    assert group.weight_version == 0
    assert _served_by(group) == {"0#1@1"}
    late.set()
    assert refused.wait(SOON_S) and first.sync_calls == []
    assert _all_run(group)
    group.update_weights_sync(sender, 1)
    assert len(_served_by(group)) == 2


def test_death_that_a_request_notices_while_the_trainer_is_busy_is_the_engines(group_of: Any, sender: Any) -> None:
    def killed() -> None:
        first.kill()
        assert _soon(lambda: 0 in group.quarantined)

    group, (first, _) = group_of()
    group.submit(PROMPT, Sample(max_tokens=1000, ignore_eos=True))
    assert _soon(lambda: first.in_flight == 1)
    assert group.update_weights_sync(Sender(sender, at1=killed), 1).version == 1
    assert group.weight_version == 1


def test_learner_lost_half_way_leaves_the_committed_version_serving(group_of: Any, sender: WeightSender) -> None:
    def lost() -> None:
        begun.append(group.generate_sync(PROMPT, Sample(max_tokens=2)))
        raise ConnectionError("the learner is gone")

    begun: list[Completion] = []
    group, _ = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=200, ignore_eos=True)) for _ in range(4)]
    with pytest.raises(ConnectionError, match="the learner is gone"):
        group.update_weights_sync(Sender(sender, at2=lost), 1)
    assert begun[0].labels == {"1#1@0"}
    with pytest.raises(WeightUpdateError, match="not proven by every engine"):
        asyncio.run(group.proven(begun[0].labels))
    completions = [future.result(SOON_S) for future in futures]
    assert {label for completion in completions for label in completion.labels} == {"0#1@1"}
    assert group.weight_version == 0
    assert _served_by(group) == {"0#1@1"}
    assert group.update_weights_sync(sender, 1).label == "1"
    assert _served_by(group) == {"1#2@0", "1#1@1"}
    asyncio.run(group.proven(["1#2@0", "1#1@1"]))


def test_requests_of_an_engine_that_dies_are_answered_by_another(group_of: Any, sender: WeightSender) -> None:
    group, (first, _) = group_of()
    futures = [group.submit(PROMPT, LONG) for _ in range(8)]
    assert _soon(lambda: first.in_flight == 4)
    first.kill()
    completions = [future.result(SOON_S) for future in futures]
    assert [completion.finish_reason for completion in completions] == ["length"] * 8
    assert {label for completion in completions for label in completion.labels} == {"0#1@1"}
    assert "died" in group.quarantined[0]
    asyncio.run(group.proven(["0#1@1"]))
    assert _all_run(group)
    assert _served_by(group) == {"0#1@1"}  # it runs, and has no weights yet
    group.update_weights_sync(sender, 1)
    assert _served_by(group) == {"1#1@0", "1#1@1"}


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
    assert "1#1@0" in _served_by(group)


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
    labels = _served_by(group)
    assert {label.partition("@")[2] for label in labels} == {"0", "1"}
    asyncio.run(group.proven([*labels, "4#1@0"]))  # what was proven before stays so


def test_restart_starts_again_only_what_does_not_answer(group_of: Any, sender: WeightSender) -> None:
    group, (first, second) = group_of()
    second.kill()
    assert _soon(lambda: second._life.death is not None)
    assert group.restart_sync(sender, 2).version == 2
    assert _served_by(group) == {"2#1@0", "2#1@1"}
    assert first._life.death is None and len(first.manifests) == 1


def test_engine_that_does_not_start_again_stays_out_until_a_restart_of_the_group(group_of: Any, sender: Any) -> None:
    group, (first, _) = group_of()
    first.breaks = "restart"
    first.kill()
    group.submit(PROMPT, LONG).result(SOON_S)
    assert _soon(lambda: "did not start again: cannot restart" in group.quarantined[0])
    group.update_weights_sync(sender, 1)
    assert _served_by(group) == {"1#1@1"}
    first.breaks = ""
    group.restart_sync(sender)
    assert _served_by(group) == {"1#1@0", "1#2@1"}


def test_engine_that_fails_under_a_pause_for_the_last_requests_is_left_out_of_it(group_of: Any) -> None:
    group, (first, _) = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=200, ignore_eos=True)) for _ in range(4)]
    assert _soon(lambda: first.in_flight == 2)
    pause = group.start(group._pause("wait", True))
    assert _soon(lambda: first._paused == "wait")
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
    assert _soon(lambda: all(engine._life.death for engine in engines))
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
    assert len(_served_by(group)) == 2


def test_request_aborted_while_its_engine_fails_comes_back_as_aborted(group_of: Any) -> None:
    group, (first, _) = group_of()
    waiting = group.submit(PROMPT, Sample(max_tokens=1000, ignore_eos=True), request_id="a")
    assert _soon(lambda: first.in_flight == 1)

    async def scenario() -> Completion:
        first.hangs = "abort"
        first._abort = lambda ids: first._fault("abort")  # type: ignore[method-assign]
        await asyncio.wait_for(group.abort(["a"]), 2)
        return await asyncio.wait_for(asyncio.wrap_future(waiting), 2)

    completion = asyncio.run(scenario())
    assert (completion.request_id, completion.finish_reason, completion.token_ids) == ("a", "abort", ())
    assert "did not abort" in group.quarantined[0]


def test_update_that_aborts_gives_back_partial_answers(group_of: Any, sender: WeightSender) -> None:
    group, engines = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=1000, ignore_eos=True)) for _ in range(4)]
    assert _soon(lambda: [engine.in_flight for engine in engines] == [2, 2])
    group.start(group._update_weights(sender, 1, "abort", True)).result(SOON_S)
    assert {future.result(SOON_S).finish_reason for future in futures} == {"abort"}


def test_update_older_than_the_committed_version_is_refused(group_of: Any, sender: WeightSender) -> None:
    group, _ = group_of()
    group.update_weights_sync(sender, 2)
    with pytest.raises(ConfigError, match="1 is older than 2"):
        group.update_weights_sync(sender, 1)
    assert group.quarantined == {}


def test_cancelled_update_ends_with_the_engine_under_way_started_again(group_of: Any, sender: Any) -> None:
    group, (first, _) = group_of(update_s=60)
    first.hangs = "update"
    update: Future[Any] = group.start(group._update_weights(sender, 1, "keep", True))
    time.sleep(0.1)
    update.cancel()
    assert _soon(lambda: 0 in group.quarantined)
    assert _served_by(group) == {"0#1@1"}
    assert _all_run(group)
    group.update_weights_sync(sender, 1)
    assert len(_served_by(group)) == 2


def test_closing_the_group_closes_its_engines(group_of: Any) -> None:
    group, engines = group_of()
    waiting = group.submit(PROMPT, Sample(max_tokens=1000))
    group.close()
    with pytest.raises(EngineError, match="closed"):
        waiting.result(SOON_S)
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            engine.submit(PROMPT, LONG)


def _served_by(group: Engine) -> set[str]:
    """The labels of a few requests, sent at once."""
    futures = [group.submit(PROMPT, Sample(max_tokens=3)) for _ in range(6)]
    return {label for future in futures for label in future.result(SOON_S).labels}


def _all_run(group: EngineGroup) -> bool:
    """Whether every engine that was put in quarantine has been started again."""
    return _soon(lambda: all(member.state != "down" for member in group._members))


def _soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
