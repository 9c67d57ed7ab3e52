"""A server that hangs, dies, was restarted, or refuses: each ends in one clear error, on a made-up server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_server import FakeSender, FakeServer, soon

from rlenv.engine import server as server_module
from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.server import ServerEngine
from rlenv.errors import ConfigError, EngineDeadError, EngineError, WeightUpdateError
from rlenv.types import Sample

PROMPT = [65, 66]
GENERATE = "/inference/v1/generate"
pytestmark = pytest.mark.slow  # each test starts a server of its own
SHORT = Sample(max_tokens=3)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(server_module, "HEARTBEAT_S", 0.05)
    server = FakeServer()
    yield server
    server.kill()


@pytest.fixture
def connect(fake: FakeServer) -> Iterator[Callable[..., ServerEngine]]:
    """`connect(**options)` gives an engine of the made-up server, closed at the end; a busy machine is no hang."""
    engines: list[ServerEngine] = []

    def start(**options: Any) -> ServerEngine:
        engines.append(ServerEngine(fake.url, **{"timeout_s": 10.0, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_completion_carries_ids_logprobs_and_label(connect: Callable[..., ServerEngine]) -> None:
    completion = connect().generate_sync(PROMPT, SHORT, request_id="mine")
    assert (completion.request_id, completion.token_ids) == ("mine", (65, 66, 67))
    assert completion.logprobs == (-1.0, -1.0, -1.0)
    assert [(span.label, span.start, span.end) for span in completion.spans] == [("0", 0, 3)]


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://localhost", "http://"])
def test_what_is_no_url_is_told_what_one_looks_like(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8000"):
        ServerEngine(url)


def test_no_server_is_an_error_that_names_the_address(fake: FakeServer) -> None:
    fake.kill()
    with pytest.raises(EngineDeadError, match=f"{fake.url}/v1/models found no server"):
        ServerEngine(fake.url)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_wrong_token_is_refused_with_advice(
    fake: FakeServer, connect: Callable[..., ServerEngine], token: str | None
) -> None:
    fake.token = "right"
    with pytest.raises(ConfigError, match="pass the token"):
        connect(token=token)
    assert connect(token="right").generate_sync(PROMPT, SHORT).token_ids


@pytest.mark.parametrize(
    ("route", "status", "message", "advice"),
    [
        ("/is_paused", 404, "Not Found", "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", 500, "no attribute 'rlenv_settings'", "--worker-extension-cls"),
    ],
)
def test_server_without_what_an_engine_needs_is_refused_with_advice(
    fake: FakeServer, connect: Callable[..., ServerEngine], route: str, status: int, message: str, advice: str
) -> None:
    fake.fails[route] = (status, message)
    with pytest.raises(ConfigError, match=advice):
        connect()


def test_server_without_token_ids_is_told_how_to_start(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    fake.fails[GENERATE] = (403, "Scale-out endpoints are disabled.")
    with pytest.raises(ConfigError, match=r"Scale-out endpoints are disabled.*rlenv serve"):
        connect().generate_sync(PROMPT, SHORT)


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [("logprobs_mode", "raw_logprobs", "processed_logprobs"), ("transport", None, "--weight-transfer-config")],
)
def test_server_with_a_setting_that_cannot_work_is_refused(
    fake: FakeServer, connect: Callable[..., ServerEngine], setting: str, value: str | None, advice: str
) -> None:
    fake.setup[setting] = value
    with pytest.raises(ConfigError, match=advice):
        connect()


def test_server_that_is_found_paused_is_not_taken_over(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    fake.paused = True
    with pytest.raises(EngineError, match="paused"):
        connect()


def test_server_that_hangs_ends_every_call_and_names_the_route(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect(timeout_s=2.0)
    fake.hangs |= {GENERATE, "/pause"}
    waiting = engine.submit(PROMPT, SHORT)
    assert soon(lambda: fake.calls[GENERATE] == 1)
    with pytest.raises(EngineDeadError, match=rf"POST {fake.url}/pause was not answered within 2 s"):
        engine.pause_sync()
    with pytest.raises(EngineDeadError, match="1 requests were pending"):
        waiting.result(1)
    with pytest.raises(EngineDeadError):
        engine.submit(PROMPT, SHORT)


@pytest.mark.slow
def test_server_that_hangs_while_it_generates_is_noticed(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect(timeout_s=2.0)
    fake.hangs.add("*")
    with pytest.raises(EngineDeadError, match=r"was not answered within 2 s"):
        engine.submit(PROMPT, SHORT).result(5)


def test_server_that_dies_is_noticed_while_nobody_calls(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine = connect()
    fake.kill()
    assert soon(lambda: engine._life.death is not None)
    with pytest.raises(EngineDeadError, match="found no server"):
        engine.submit(PROMPT, SHORT)


def test_request_that_is_broken_off_is_named_and_not_repeated(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect()
    fake.breaks[GENERATE] = 1
    with pytest.raises(EngineError, match=r"generate for request 'mine' was broken off") as caught:
        engine.generate_sync(PROMPT, SHORT, request_id="mine")
    assert not isinstance(caught.value, EngineDeadError)
    assert fake.calls[GENERATE] == 1
    assert engine.generate_sync(PROMPT, SHORT).token_ids


def test_what_may_be_done_twice_is_repeated_a_bounded_number_of_times(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect()
    fake.calls.clear()
    fake.breaks["/resume"] = 2
    engine.resume_sync()
    assert fake.calls["/resume"] == 3
    fake.breaks["/resume"] = 9
    with pytest.raises(EngineError, match="/resume was broken off"):
        engine.resume_sync()
    assert fake.calls["/resume"] == 6


def test_update_is_proven_over_http(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine = connect()
    report = engine.update_weights_sync(FakeSender(), 5)
    assert (report.label, report.tensors, report.mismatch_max, fake.label) == ("5", 1, 0.0, "5")
    assert engine.generate_sync(PROMPT, SHORT).labels == {"5"}


def test_nan_that_json_cannot_carry_refutes_the_update(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine = connect()
    fake.fails[GENERATE] = (400, "Out of range float values are not JSON compliant: nan")
    with pytest.raises(WeightUpdateError, match="prefill canary"):
        engine.update_weights_sync(FakeSender(), 1)


def test_pause_that_overtakes_a_request_waits_for_it_all_the_same(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect()
    fake.late[GENERATE] = 0.3
    request = engine.submit(PROMPT, SHORT)
    engine.pause_sync("wait")
    assert request.result(0).finish_reason == "length"
    assert fake.paused and fake.calls["/pause"] == 2


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"])
def test_server_that_dies_during_an_update_ends_it_in_seconds(
    fake: FakeServer, connect: Callable[..., ServerEngine], route: str
) -> None:
    engine = connect()
    fake.dies_at = route
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=fake.url):
        engine.update_weights_sync(FakeSender(), 1)
    assert time.monotonic() - began < 5
    assert fake.calls[route] == 1


@pytest.mark.slow
def test_server_that_hangs_in_a_transfer_ends_it_and_the_senders_thread(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect(timeout_s=2.0)
    sender = _Noting()
    fake.hangs |= {"/update_weights", "/health", "/resume"}
    with pytest.raises(EngineDeadError, match="/health was not answered"):
        engine.update_weights_sync(sender, 1)
    assert soon(lambda: sender.ended)


def test_restarted_server_is_never_served_silently(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine = connect()
    engine.update_weights_sync(FakeSender(), 3)
    fake.restart()
    with pytest.raises(EngineDeadError, match=r"'default'"):
        while True:
            assert engine.generate_sync(PROMPT, SHORT).labels == {"3"}


def test_restarted_server_is_noticed_while_nobody_calls(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine = connect()
    engine.update_weights_sync(FakeSender(), 3)
    fake.restart()
    assert soon(lambda: engine._life.death is not None)
    assert "labelled 'default' instead of '3': it was restarted" in str(engine._life.death)


def test_another_client_that_changes_the_weights_is_noticed(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect()
    engine.update_weights_sync(FakeSender(), 3)
    connect()
    assert soon(lambda: engine._life.death is not None)


@pytest.mark.parametrize("paused", [False, True])
def test_restart_brings_the_weights_back_before_anything_is_served(
    fake: FakeServer, connect: Callable[..., ServerEngine], paused: bool
) -> None:
    engine = connect()
    engine.update_weights_sync(FakeSender(), 3)
    fake.restart()
    fake.paused = paused
    assert soon(lambda: engine._life.death is not None)
    report = engine.restart_sync(FakeSender())
    assert (report.version, report.label, fake.label, fake.paused) == (3, "3#2", "3#2", False)
    assert engine.generate_sync(PROMPT, SHORT).labels == {"3#2"}


@pytest.mark.parametrize("route", ["/update_weight_version", "/weight_info", "/pause"])
def test_label_that_changes_under_a_heartbeat_is_no_alarm(
    fake: FakeServer, connect: Callable[..., ServerEngine], route: str
) -> None:
    engine = connect()
    fake.slow[route] = 0.2
    for version in (1, 2):
        engine.update_weights_sync(FakeSender(), version)
    assert engine.generate_sync(PROMPT, SHORT).labels == {"2"}


def test_learner_that_dies_in_mid_transfer_leaves_an_engine_that_serves_nothing_until_an_update(
    fake: FakeServer, connect: Callable[..., ServerEngine]
) -> None:
    engine = connect()
    with pytest.raises(WeightUpdateError, match="the learner is gone"):
        engine.update_weights_sync(_Dying(), 1)
    with pytest.raises(WeightUpdateError, match="the learner is gone"):
        engine.generate_sync(PROMPT, SHORT)
    engine.update_weights_sync(FakeSender(), 1)
    assert engine.generate_sync(PROMPT, SHORT).labels == {"1#3"}


def test_close_leaves_the_server_running_and_not_paused(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine = connect()
    engine.pause_sync("keep")
    fake.hangs.add(GENERATE)
    waiting = engine.submit(PROMPT, SHORT)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="is closed"):
        waiting.result(1)
    fake.hangs.clear()
    assert not fake.paused
    assert connect().generate_sync(PROMPT, SHORT).token_ids


class _Noting(FakeSender):
    ended = False

    def send(self, client: WeightSyncClient) -> Manifest:
        try:
            return super().send(client)
        finally:
            self.ended = True


class _Dying(FakeSender):
    def send(self, client: WeightSyncClient) -> Manifest:
        client.start_weight_update()
        client.update_weights({"names": ["weight"], "shapes": [[2]]})
        raise ConnectionError("the learner is gone")
