"""A server is started as an engine needs it, tells why it did not start, and outlives nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.faults import catalogue, inject
from rlenv.engine import serving
from rlenv.engine.base import Manifest, WeightSyncClient
from rlenv.engine.process import server_environment
from rlenv.engine.remote import _in_json
from rlenv.engine.server import ServerEngine
from rlenv.engine.serving import serve
from rlenv.engine.settings import engine_settings
from rlenv.engine.transfer.plugin import PARENT
from rlenv.engine.transfer.sender import ModelSender
from rlenv.errors import ConfigError, EngineDeadError, EngineError
from rlenv.models import default_model
from rlenv.types import Completion, Sample

PROMPT = [9, 8, 7]
LONG = Sample(max_tokens=200, ignore_eos=True)
OVER_HTTP = ["NaN in transit", "lowest bit of one weight flipped", "worker dies half way", "label without transfer"]


def test_command_line_says_what_the_engine_in_process_is_told() -> None:
    words = engine_settings(default_model(), device="cpu", max_model_len=256).command_line()
    assert words[words.index("--model") + 1] == default_model()
    assert words[words.index("--max-model-len") + 1] == "256"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": "shm"}
    assert {"--no-enable-chunked-prefill", "--enforce-eager", "--disable-log-stats"} <= set(words)


def test_servers_environment_has_no_launchers_variables_and_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    before = dict(os.environ)
    environment = server_environment({"VLLM_SERVER_DEV_MODE": "1"})
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]
    assert not {"RANK", "MASTER_ADDR"} & environment.keys()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("model", "options", "advice"),
    [("/no/such/folder", {}, "folder"), (default_model(), {"port": 70000}, "65535")],
)
def test_what_cannot_work_starts_nothing(model: str, options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        serve(model, **options)


def test_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho the disk is on fire\nexit 3\n")
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(serving.sys, "executable", str(interpreter))
    with pytest.raises(EngineError, match="status 3\nthe disk is on fire"):
        serve(default_model(), device="cpu")


def test_server_whose_starter_is_gone_ends_itself() -> None:
    code = "import time; from rlenv.engine.transfer.plugin import register; register(); time.sleep(60)"
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = {**os.environ, PARENT: str(gone.pid)}
    server = subprocess.Popen([sys.executable, "-c", _WITHOUT_VLLM + code], env=environment)
    assert server.wait(20) == 1


@pytest.mark.engine
def test_handle_of_a_gpus_memory_survives_json() -> None:
    from rlenv.engine.transfer.ipc import _restored

    plain = [None, [2, 3], [3, 1], 0, None, "float32", 0, b"\x00handle\xff", 24, 0, b"counter", 0, None, True]
    through_json = json.loads(json.dumps(_in_json({"ipc_handles": [{"GPU-1": plain}]})))
    assert _restored(through_json["ipc_handles"][0]["GPU-1"]) == _restored(plain)


@pytest.mark.engine
def test_wrong_token_is_refused_and_the_server_left_as_it_was(server_engine: ServerEngine) -> None:
    with pytest.raises(ConfigError, match="pass the token"):
        ServerEngine(server_engine.url, token="wrong")
    assert server_engine.generate_sync(PROMPT, LONG).finish_reason == "length"


@pytest.mark.engine
@pytest.mark.parametrize("name", OVER_HTTP)
def test_fault_is_caught_over_http_as_in_process(server_engine: Any, name: str) -> None:
    [fault] = [fault for fault in catalogue() if fault.name == name]
    caught = asyncio.run(asyncio.wait_for(inject(server_engine, _model(), fault), 60))
    assert (caught.withheld, caught.served_on) == (8, False)
    server_engine.update_weights_sync(_sender(server_engine), server_engine.weight_version + 1)


@pytest.mark.engine
@pytest.mark.slow
def test_server_that_dies_in_an_update_and_comes_back_with_old_weights(
    command: subprocess.Popen[str],
) -> None:
    url = _announced(command)
    family = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    assert len(family) >= 4  # the command, the server, vLLM's core and its worker
    with ServerEngine(url, token="secret") as engine:
        model = _model()
        _move(model)
        sender = ModelSender(model, backend=engine.transport, dtype=engine.dtype)
        engine.update_weights_sync(sender, 1)
        answered = engine.generate_sync(PROMPT, LONG)
        engine.pause_sync("keep")
        waiting = [engine.submit(PROMPT, LONG) for _ in range(4)]  # in flight until the update lets them go on
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=url):
            engine.update_weights_sync(_Killing(sender, command), 2)
        for request in waiting:
            with pytest.raises(EngineDeadError):
                request.result(5)
        assert time.monotonic() - began < 30
        _, alive = psutil.wait_procs(family, timeout=20)
        assert alive == []
        with serve(default_model(), device="cpu", max_model_len=256, token="secret", port=int(url.split(":")[-1])):
            with pytest.raises(EngineDeadError):
                engine.submit(PROMPT, LONG)
            report = engine.restart_sync(sender)
            assert (report.version, report.refuted) == (1, 0)
            again = engine.generate_sync(PROMPT, LONG)
            assert again.labels == {report.label} != answered.labels
            assert _gap(sender, answered) < 1e-4 and _gap(sender, again) < 1e-4


@pytest.fixture
def command() -> Iterator[subprocess.Popen[str]]:
    """`rlenv serve` in a process of its own."""
    arguments = [
        "serve",
        default_model(),
        "--port",
        "0",
        "--device",
        "cpu",
        "--max-model-len",
        "256",
        "--token",
        "secret",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlenv.agents.cli", *arguments], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def _announced(command: subprocess.Popen[str]) -> str:
    assert command.stdout is not None
    line = command.stdout.readline()
    assert " is served at http://127.0.0.1:" in line
    return line.split()[-1]


class _Killing:
    """Kills who started the server once the first half of an update is there, and waits until the server is gone."""

    def __init__(self, sender: ModelSender, command: subprocess.Popen[str]) -> None:
        self._sender, self._command = sender, command
        self.logprobs = sender.logprobs

    def send(self, client: WeightSyncClient) -> Manifest:
        return self._sender.send(_KillingClient(client, self._command))


class _KillingClient:
    def __init__(self, client: WeightSyncClient, command: subprocess.Popen[str]) -> None:
        self.peer = client.peer
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update = client.start_weight_update
        self.update_weights = client.update_weights
        self._client, self._command = client, command

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        children = psutil.Process(self._command.pid).children(recursive=True)
        self._command.send_signal(signal.SIGKILL)
        psutil.wait_procs(children, timeout=20)
        self._client.finish_weight_update(weight_version)


def _model() -> Any:
    return AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)


def _sender(engine: ServerEngine) -> ModelSender:
    return ModelSender(_model(), backend=engine.transport, dtype=engine.dtype)


def _move(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)


def _gap(sender: ModelSender, completion: Completion) -> float:
    """The largest |Δ log-prob| between engine and learner over the sampled ids."""
    [logprobs] = sender.logprobs([completion.prompt_ids + completion.token_ids])
    expected = logprobs[len(completion.prompt_ids) - 1 :]
    return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))


_WITHOUT_VLLM = """
import sys, types
factory = types.ModuleType("vllm.distributed.weight_transfer.factory")
factory.WeightTransferEngineFactory = type("F", (), {"_registry": {"shm": 0, "rlenv_ipc": 0}})
for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[factory.__name__] = factory
"""
