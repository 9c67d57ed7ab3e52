"""`rlenv verify-sync` names what differs between a server and a checkpoint, and what it could not compare."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlenv.agents.cli import main
from rlenv.engine.remote import RemoteVLLM
from rlenv.engine.serving import Server
from rlenv.engine.transfer.sensitivity import canary_limits, fingerprint_limit, representatives
from rlenv.engine.verify import SyncReport, compare
from rlenv.models import default_model

TENSOR = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["http://127.0.0.1:9"], "found no server"),
        (["127.0.0.1:8000"], "http://127.0.0.1:8000"),
    ],
)
def test_what_cannot_work_ends_with_status_2(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-sync", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1 and advice in errors


def test_folder_without_a_model_and_server_without_development_mode_end_with_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = FakeServer()
    assert main(["verify-sync", fake.url, "--checkpoint", str(tmp_path)]) == 2
    assert "--checkpoint" in capsys.readouterr().err
    fake.fails["/weight_info"] = (404, "Not Found")
    assert main(["verify-sync", fake.url]) == 2
    assert "VLLM_SERVER_DEV_MODE=1" in capsys.readouterr().err
    fake.kill()


def test_report_without_anything_compared_is_no_match() -> None:
    report = SyncReport("http://x", "folder", "default", not_covered=["tensors", "log-probs"])
    assert not report.matches and report.lines()[-1] == "the server could not be compared with this checkpoint"


def test_smallest_errors_are_found_by_kind_of_tensor() -> None:
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    names = representatives(model)
    assert len(names) == len({name.split(".")[-2] for name in names}) < len(list(model.named_parameters()))
    limits = canary_limits(model, torch.float32, names[:2])
    assert all(fingerprint_limit(torch.float32) < limit < 0.01 for limit in limits.values())


@pytest.mark.engine
def test_right_checkpoint_matches_bit_for_bit(vllm_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-sync", vllm_server.url, "--token", "secret"]) == 0
    output = capsys.readouterr().out
    count = len(load_file(Path(default_model(), "model.safetensors")))
    assert f"matches      {count} tensors, bit for bit" in output
    assert "log-probs of canaries" in output and "not covered" not in output
    assert "a relative error of 1e-07 in any one weight" in output


@pytest.mark.engine
def test_changed_tensor_is_named(
    vllm_server: Server, checkpoint: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(lambda tensor: tensor * 1.01)
    assert main(["verify-sync", vllm_server.url, "--token", "secret", "--checkpoint", folder]) == 1
    output = capsys.readouterr().out
    named = [line.split()[1] for line in output.splitlines() if line.startswith("differs")]
    assert named == [f"{TENSOR}:", "log-probs:"]


@pytest.mark.engine
def test_one_flipped_bit_is_named_where_log_probs_are_blind(
    vllm_server: Server, checkpoint: Callable[..., str]
) -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int32)[0, 0] ^= 1
        return tensor

    report = asyncio.run(compare(vllm_server.url, checkpoint(flip), "secret"))
    [wrong] = report.wrong
    assert wrong.startswith(TENSOR) and report.canary_gap is not None


@pytest.mark.engine
def test_server_without_our_extension_is_compared_by_log_probs_and_that_is_said(
    vllm_server: Server, checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RemoteVLLM.extension

    async def unknown(self: RemoteVLLM, method: str) -> list[Any]:
        return await known(self, f"no_{method}")

    monkeypatch.setattr(RemoteVLLM, "extension", unknown)
    right = asyncio.run(compare(vllm_server.url, default_model(), "secret"))
    assert right.matches and right.tensors == 0 and right.dtype == "float32"
    assert "--worker-extension-cls" in right.not_covered[0]
    assert any("o_proj" in what and size < 0.01 for what, size in right.smallest.items())
    wrong = asyncio.run(compare(vllm_server.url, checkpoint(lambda tensor: tensor * 1.1), "secret"))
    assert not wrong.matches and wrong.wrong[0].startswith("log-probs: ")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """`checkpoint(change)` is the shipped model with one tensor changed."""

    def make(change: Callable[[torch.Tensor], torch.Tensor]) -> str:
        folder = tmp_path / "changed"
        shutil.copytree(default_model(), folder)
        weights = load_file(folder / "model.safetensors")
        weights[TENSOR] = change(weights[TENSOR])
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return make
