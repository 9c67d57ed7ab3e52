"""The steps of a weight update have deadlines, on an engine that is made up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rlenv.engine.base import Manifest, TensorDigest, WeightSyncClient
from rlenv.engine.transfer import update
from rlenv.engine.transfer.update import WeightUpdater, check_announced
from rlenv.errors import ConfigError, EngineError, LearnerError, WeightUpdateError

HELD = {"checkpoint": [["w", "w", "float32", [2], "0"]], "constant": []}
INFO = {"names": ["w"], "shapes": [[2]]}


class Control:
    """An engine that does what it is told, except for the calls in `hangs`."""

    dtype = "float32"
    proof = True
    in_flight = 0
    ended = False

    def __init__(self, *hangs: str) -> None:
        self.hangs = hangs
        self.calls: list[str] = []

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hangs:
            await asyncio.Event().wait()

    async def hold(self, mode: str, clear_cache: bool) -> None:
        await self._call("hold")

    async def release(self) -> None:
        await self._call("release")

    async def drop_all(self) -> None:
        await self._call("drop_all")

    async def rpc(self, method: str, info: Any = None) -> None:
        await self._call(method)

    async def set_label(self, label: str) -> None:
        self.label = label
        await self._call("set_label")

    async def worker_weights(self) -> list[Any]:
        await self._call("worker_weights")
        return [HELD]

    async def served_label(self) -> str:
        return self.label

    async def canaries(self) -> list[Any]:
        return []

    def die(self, how: str) -> None:
        self.calls.append(how)


class Sender:
    """Sends one tensor; before the call that `waits_at` names, it waits until the test has ended."""

    def __init__(self, waits_at: str = "") -> None:
        self.waits_at = waits_at
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None

    def send(self, client: WeightSyncClient) -> Manifest:
        try:
            self._step("start", client.start_weight_update)
            self._step("update", client.update_weights, INFO)
            self._step("finish", client.finish_weight_update)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.ended.set()
        return {"w": TensorDigest("float32", (2,), "0")}

    def _step(self, name: str, call: Any, *arguments: Any) -> None:
        if name == self.waits_at:
            self.go_on.wait(10)
        call(*arguments)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        if self.waits_at == "logprobs":
            self.go_on.wait(10)
        return []


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TRANSFER_DEADLINE_S", "PROOF_DEADLINE_S", "ANSWER_DEADLINE_S"):
        monkeypatch.setattr(update, name, 0.05)
    yield


def refused(control: Control, sender: Sender) -> WeightUpdateError:
    async def scenario() -> WeightUpdateError:
        updater = WeightUpdater(control)
        updater.started([HELD])
        with pytest.raises(WeightUpdateError) as caught:
            await updater.update(sender, 1, "keep", True)
        sender.go_on.set()
        await asyncio.to_thread(sender.ended.wait, 5)
        return caught.value

    return asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ({"names": [], "shapes": []}, "w: it is missing"),
        ({"names": ["w", "v"], "shapes": [[2], [2]]}, "v: the engine's model has no such tensor"),
        ({"names": ["w"], "shapes": [[3]]}, r"w: its shape is \[3\]"),
        ([INFO], "a list of 1 for 2 workers"),
        ([INFO, {"names": [], "shapes": []}], "w: it is missing"),
    ],
    ids=["missing", "unknown", "shape", "buckets", "one worker's missing"],
)
def test_what_a_sender_announces_has_to_be_the_whole_model_of_each_worker(info: Any, named: str) -> None:
    check_announced(1, INFO, HELD, 2)
    check_announced(1, [INFO, INFO], HELD, 2)
    with pytest.raises(WeightUpdateError, match=named):
        check_announced(1, info, HELD, 2)


@pytest.mark.parametrize("waits_at", ["start", "update"])
def test_sender_that_hangs_before_anything_is_loaded_leaves_the_old_weights(waits_at: str) -> None:
    control, sender = Control(), Sender(waits_at)
    assert "the transfer took over" in str(refused(control, sender))
    assert control.calls == ([] if waits_at == "start" else ["hold", "release"])
    assert isinstance(sender.error, EngineError) and "is over" in str(sender.error)


def test_sender_that_hangs_with_half_an_update_loaded_is_tried_again() -> None:
    control = Control()
    assert "the transfer took over" in str(refused(control, Sender("finish")))
    assert control.calls.count("start_weight_update") == 2
    assert control.calls[-2:] == ["drop_all", "release"]


def test_an_engine_may_answer_the_later_the_larger_its_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "SLOWEST_BYTES_PER_S", 8 / 0.3)  # of which the model has 8

    class Late(Control):
        async def drop_all(self) -> None:
            await asyncio.sleep(0.2)  # its worker is still in the transfer that was given up
            await self._call("drop_all")

    control = Late()
    refused(control, Sender("finish"))
    assert control.calls[-2:] == ["drop_all", "release"]
    monkeypatch.setattr(update, "SLOWEST_BYTES_PER_S", 1e9)
    control = Late()
    refused(control, Sender("finish"))
    assert "does not answer" in control.calls


@pytest.mark.parametrize("error", [ConfigError("NCCL is pinned otherwise"), LearnerError("the learner is gone")])
def test_second_attempt_that_cannot_even_begin_leaves_no_engine_paused_with_half_an_update(error: Exception) -> None:
    class Broken(Sender):
        """Breaks in mid-transfer, and then cannot reach the engine at all."""

        attempts = 0

        def send(self, client: WeightSyncClient) -> Manifest:
            self.attempts += 1
            if self.attempts == 2:
                raise error
            client.start_weight_update()
            client.update_weights(INFO)
            raise ConnectionError("the connection broke")

    control = Control()

    async def scenario() -> None:
        updater = WeightUpdater(control)
        updater.started([HELD])
        with pytest.raises(type(error), match=str(error)):
            await updater.update(Broken(), 1, "keep", True)
        assert control.calls[-2:] == ["drop_all", "release"]
        assert isinstance(updater.condemned, WeightUpdateError) and str(error) in str(updater.condemned)
        with pytest.raises(WeightUpdateError, match=str(error)):
            await updater.ledger.wait({"1#2"})
        await updater.update(Sender(), 1, "keep", True)
        assert updater.condemned is None

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_engine_that_hangs_in_a_transfer_lets_the_sender_go() -> None:
    control, sender = Control("update_weights"), Sender()
    assert "the transfer took over" in str(refused(control, sender))
    assert sender.error is not None


def test_learner_that_never_tells_its_log_probs_proves_nothing() -> None:
    control = Control()
    assert "the proof took over" in str(refused(control, Sender("logprobs")))
    assert control.calls[-2:] == ["drop_all", "release"]


def test_engine_that_does_not_resume_is_declared_dead() -> None:
    control = Control("release")
    refused(control, Sender("update"))
    assert control.calls[-1] == "does not answer"


@pytest.mark.parametrize("waits_at", ["start", "update", "finish", "logprobs"])
def test_cancelled_update_never_leaves_half_of_it_behind(waits_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "TRANSFER_DEADLINE_S", 10.0)
    monkeypatch.setattr(update, "PROOF_DEADLINE_S", 10.0)
    control, sender = Control(), Sender(waits_at)

    async def scenario() -> None:
        updater = WeightUpdater(control)
        updater.started([HELD])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(updater.update(sender, 1, "keep", True), 0.3)
        with pytest.raises(WeightUpdateError, match="cancelled"):
            await updater.ledger.wait({"1"})
        calls = list(control.calls)
        sender.go_on.set()
        await asyncio.to_thread(sender.ended.wait, 5)
        assert control.calls == calls, "a sender that comes late changes nothing"
        if waits_at in ("start", "update"):
            assert calls == {"start": [], "update": ["hold", "release"]}[waits_at]
            assert (updater.version, updater.condemned) == (0, None)
        else:
            assert calls[-2:] == ["drop_all", "release"]
            assert isinstance(updater.condemned, WeightUpdateError)
        report = await updater.update(Sender(), 1, "keep", True)
        assert (updater.version, updater.condemned, report.label) == (1, None, updater.label)

    asyncio.run(scenario())
