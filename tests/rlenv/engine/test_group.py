"""A group balances load, and no token passes whose weights were not proven and committed."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from rlenv.engine.base import Manifest, UpdateReport, WeightSender, WeightSyncClient
from rlenv.engine.group import EngineGroup
from rlenv.engine.members import label_in_group
from rlenv.errors import ConfigError, EngineError, WeightUpdateError
from rlenv.types import Completion, Sample, version_of
from tests.rlenv.engine.groups import LONG, PROMPT, SOON_S, Sender, all_run, served_by, soon


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
    assert soon(lambda: [engine.in_flight for engine in engines] == [1, 3])
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


def test_update_that_every_engine_refuses_is_an_error_and_the_next_one_heals(group_of: Any, sender: Any) -> None:
    group, engines = group_of()
    for engine in engines:
        engine.refuted = {"1", "1#2"}
    with pytest.raises(WeightUpdateError, match="version 1"):
        group.update_weights_sync(sender, 1)
    assert (group.weight_version, asyncio.run(group.is_paused()), group.quarantined) == (0, False, {})
    assert group.update_weights_sync(sender, 1).label == "1"
    assert served_by(group) == {"1#3@0", "1#3@1"}


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
    with pytest.raises(WeightUpdateError, match=r"the sender took over 1 s"):
        group.update_weights_sync(Late(), 1)
    assert group.weight_version == 0
    assert served_by(group) == {"0#1@1"}
    late.set()
    assert refused.wait(SOON_S) and first.sync_calls == []
    assert all_run(group)
    group.update_weights_sync(sender, 1)
    assert len(served_by(group)) == 2


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
    assert served_by(group) == {"0#1@1"}
    assert group.update_weights_sync(sender, 1).label == "1"
    assert served_by(group) == {"1#2@0", "1#1@1"}
    asyncio.run(group.proven(["1#2@0", "1#1@1"]))


def test_update_that_aborts_gives_back_partial_answers(group_of: Any, sender: WeightSender) -> None:
    group, engines = group_of()
    futures = [group.submit(PROMPT, Sample(max_tokens=1000, ignore_eos=True)) for _ in range(4)]
    assert soon(lambda: [engine.in_flight for engine in engines] == [2, 2])
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
    assert soon(lambda: 0 in group.quarantined)
    assert served_by(group) == {"0#1@1"}
    assert all_run(group)
    group.update_weights_sync(sender, 1)
    assert len(served_by(group)) == 2


def test_closing_the_group_closes_its_engines(group_of: Any) -> None:
    group, engines = group_of()
    waiting = group.submit(PROMPT, Sample(max_tokens=1000))
    group.close()
    with pytest.raises(EngineError, match="closed"):
        waiting.result(SOON_S)
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            engine.submit(PROMPT, LONG)
