"""The scripted engine says what its policy says, and ends in order whatever state it is in."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest

from rlenv.engine.scripted import ScriptedEngine
from rlenv.errors import EngineDeadError, EngineError, WeightUpdateError
from rlenv.types import Sample

Start = Callable[..., ScriptedEngine]
PROMPT = [10, 11]
FOREVER = [12] * 4000
QUESTION = "abc"


def test_text_of_the_policy_ends_with_the_end_token(scripted: Start, char_tokenizer: Any) -> None:
    completion = scripted(lambda prompt_ids, sample: QUESTION).generate_sync(PROMPT, Sample())
    assert (completion.text, completion.finish_reason) == (QUESTION, "stop")
    assert completion.token_ids == (10, 11, 12, char_tokenizer.eos_token_id)
    assert completion.logprobs == (-1.0,) * 4


def test_ids_of_the_policy_are_emitted_as_they_are(scripted: Start, char_tokenizer: Any) -> None:
    end = char_tokenizer.eos_token_id
    engine = scripted(lambda prompt_ids, sample: [10, end, 11])
    assert engine.generate_sync(PROMPT, Sample()).token_ids == (10, end)
    ignoring = engine.generate_sync(PROMPT, Sample(ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == ((10, end, 11), "length")
    assert engine.generate_sync(PROMPT, Sample(min_tokens=3)).token_ids == (10, end, 11)
    cut = engine.generate_sync(PROMPT, Sample(max_tokens=1))
    assert (cut.token_ids, cut.finish_reason) == ((10,), "length")


def test_policy_sees_the_prompt_and_the_sample(scripted: Start) -> None:
    engine = scripted(lambda prompt_ids, sample: f"{sum(prompt_ids)} {sample.seed}")
    assert engine.generate_sync(PROMPT, Sample(seed=7)).text == "21 7"


def test_error_of_the_policy_reaches_the_caller_of_that_request_alone(scripted: Start) -> None:
    def policy(prompt_ids: Sequence[int], sample: Sample) -> str:
        if sample.seed == 1:
            raise ZeroDivisionError("in the policy")
        return QUESTION

    engine = scripted(policy)
    with pytest.raises(ZeroDivisionError, match="in the policy"):
        engine.generate_sync(PROMPT, Sample(seed=1))
    assert engine.generate_sync(PROMPT, Sample()).text == QUESTION
    assert engine.in_flight == 0


def test_stop_string_in_the_prompt_does_not_fire(scripted: Start, char_tokenizer: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: "42</answer>xyz")
    prompt = char_tokenizer.encode("say </answer>")
    completion = engine.generate_sync(prompt, Sample(stop=("</answer>",)))
    assert (completion.text, completion.finish_reason) == ("42</answer>", "stop")
    assert completion.token_ids == tuple(char_tokenizer.encode("42</answer>"))


def test_peak_in_flight_counts_requests_that_run_together(scripted: Start) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION, delay=0.02)
    futures = [engine.submit(PROMPT, Sample()) for _ in range(64)]
    assert engine.in_flight == 64
    assert {future.result(20).text for future in futures} == {QUESTION}
    assert (engine.in_flight, engine.peak_in_flight) == (0, 64)


def test_sync_twins_do_what_the_coroutines_do(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION)
    engine.pause_sync("keep")
    waiting = engine.submit(PROMPT, Sample())
    assert asyncio.run(engine.is_paused())
    engine.resume_sync()
    assert waiting.result(5).text == QUESTION
    assert engine.update_weights_sync(sender, 3).label == "3"
    assert engine.weight_version == 3


def test_sender_is_heard_and_its_manifest_kept(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION)
    report = engine.update_weights_sync(sender, 1)
    assert [name for name, _ in engine.sync_calls] == ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [list(manifest) for manifest in engine.manifests] == [["weight"]]
    assert report.tensors == 1


def test_refuted_update_is_tried_once_more_under_a_label_of_its_own(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION)
    engine.refuted = {"1"}
    assert engine.update_weights_sync(sender, 1).label == "1#2"
    asyncio.run(engine.proven(["0", "1#2"]))
    with pytest.raises(WeightUpdateError, match="'1' that were refuted"):
        asyncio.run(engine.proven(["1"]))


def test_update_refuted_twice_is_an_error_that_names_the_version(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION)
    engine.refuted = {"4", "4#2"}
    with pytest.raises(WeightUpdateError, match="version 4") as caught:
        engine.update_weights_sync(sender, 4)
    assert caught.value.version == 4
    assert not asyncio.run(engine.is_paused())


def test_labels_are_waited_for_until_their_proof(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION, proof_delay=0.1)

    async def scenario() -> None:
        update = asyncio.create_task(engine.update_weights(sender, 1))
        completion = None
        while completion is None or completion.labels == {"0"}:
            completion = await engine.generate(PROMPT, Sample())
        assert not update.done()  # served, and not yet proven
        await engine.proven(completion.labels)
        await asyncio.wait_for(update, 0.05)

    asyncio.run(scenario())


@pytest.mark.parametrize("paused", [False, True])
def test_closing_fails_the_calls_that_wait_and_names_the_engine(scripted: Start, paused: bool) -> None:
    engine = scripted(lambda prompt_ids, sample: FOREVER, delay=0.001, model="tiny")
    if paused:
        engine.pause_sync()
    waiting = [engine.submit(PROMPT, Sample()) for _ in range(3)]
    proof = threading.Thread(target=lambda: _swallow(lambda: asyncio.run(engine.proven(["9"]))), daemon=True)
    proof.start()
    engine.close()
    engine.close()
    for future in waiting:
        with pytest.raises(EngineError, match="engine 'tiny' is closed"):
            future.result(5)
    proof.join(5)
    assert not proof.is_alive()
    with pytest.raises(EngineError, match="engine 'tiny' is closed"):
        engine.submit(PROMPT, Sample())
    with pytest.raises(EngineError, match="engine 'tiny' is closed"):
        asyncio.run(engine.resume())
    assert engine.in_flight == 0


def test_death_fails_the_calls_that_wait_and_a_restart_serves_again(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: FOREVER, delay=0.001, model="tiny")
    engine.update_weights_sync(sender, 3)
    waiting = [engine.submit(PROMPT, Sample()) for _ in range(3)]
    proof = engine.start(engine._proven(frozenset({"9"})))
    engine.kill()
    for future in (*waiting, proof):
        with pytest.raises(EngineDeadError, match="engine 'tiny' died; 3 requests were pending"):
            future.result(5)
    with pytest.raises(EngineDeadError, match="engine 'tiny' died"):
        engine.submit(PROMPT, Sample())
    report = engine.restart_sync(sender)
    assert (report.label, engine.weight_version, engine.in_flight) == ("3#2", 3, 0)
    assert engine.generate_sync(PROMPT, Sample(max_tokens=1)).labels == {"3#2"}


def test_a_death_names_the_requests_that_it_left_pending(scripted: Start) -> None:
    engine = scripted(lambda prompt_ids, sample: FOREVER, delay=0.001, model="tiny")
    names = ["math seed 3", "math seed 3", "b", None, "c", "d", "e"]
    waiting = [engine.submit(PROMPT, Sample(), request_id=name) for name in names]
    engine.kill()
    with pytest.raises(EngineDeadError, match=r"7 requests were pending: math seed 3, b, c, d, …$"):
        waiting[0].result(5)


def test_restart_without_weights_serves_nothing(scripted: Start, sender: Any) -> None:
    class Gone:
        logprobs = sender.logprobs

        def send(self, client: Any) -> Any:
            raise ConnectionError("the learner is gone")

    engine = scripted(lambda prompt_ids, sample: QUESTION)
    with pytest.raises(ConnectionError, match="gone"):
        engine.restart_sync(Gone())
    with pytest.raises(EngineDeadError, match="no weights yet"):
        engine.generate_sync(PROMPT, Sample())
    engine.restart_sync(sender)
    assert engine.generate_sync(PROMPT, Sample()).text == QUESTION


def test_engine_may_be_closed_while_it_is_dead(scripted: Start, sender: Any) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION)
    engine.kill()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.restart_sync(sender)


def test_engine_may_be_closed_from_a_callback_of_its_own(scripted: Start) -> None:
    engine = scripted(lambda prompt_ids, sample: QUESTION)
    future = engine.submit(PROMPT, Sample())
    future.add_done_callback(lambda _: engine.close())
    assert future.result(5).text == QUESTION
    deadline = time.monotonic() + 5
    while engine._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_engine_is_a_context(scripted: Start) -> None:
    with scripted(lambda prompt_ids, sample: QUESTION) as engine:
        assert engine.generate_sync(PROMPT, Sample()).text == QUESTION
    with pytest.raises(EngineError, match="closed"):
        engine.submit(PROMPT, Sample())


def test_request_cancelled_at_once_is_not_counted_any_more(scripted: Start) -> None:
    engine = scripted(lambda prompt_ids, sample: FOREVER, delay=0.001)
    for _ in range(50):
        future = engine.submit(PROMPT, Sample())
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
    engine.pause_sync("wait")
    assert engine.in_flight == 0


def test_closed_engine_is_garbage(char_tokenizer: Any) -> None:
    engine = ScriptedEngine(char_tokenizer, lambda prompt_ids, sample: QUESTION)
    engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_interpreter_exits_with_an_engine_left_open() -> None:
    code = """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from rlenv.engine.scripted import ScriptedEngine
from rlenv.types import Sample
backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
engine = ScriptedEngine(tokenizer, lambda prompt_ids, sample: [0] * 4000, delay=1.0)
futures = [engine.submit([0], Sample()) for _ in range(4)]
print("end")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def _swallow(call: Callable[[], None]) -> None:
    with pytest.raises(EngineError):
        call()


def test_nothing_is_complained_of_when_a_cancelled_request_ends_with_its_engine(
    scripted: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scripted(lambda prompt_ids, sample: FOREVER, delay=0.01)
    futures = [engine.submit(PROMPT, Sample()) for _ in range(64)]
    time.sleep(0.05)
    for future in futures:
        future.cancel()
    engine.close()
    gc.collect()
    assert not caplog.records
