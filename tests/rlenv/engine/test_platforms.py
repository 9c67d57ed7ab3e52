"""What each accelerator allows: batch invariance where it exists, and what comes nearest to it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from rlenv.engine import platforms, settings
from rlenv.engine.platforms import Rules, batch_invariance, current_platform
from rlenv.engine.settings import engine_settings
from rlenv.errors import ConfigError
from rlenv.models import default_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_gpus_from_hopper_on_are_batch_invariant_to_the_bit(capability: tuple[int, int]) -> None:
    rules = batch_invariance("cuda", capability)
    assert rules == Rules({"enforce_eager": True}, {"VLLM_BATCH_INVARIANT": "1"}, bar=1.0)


@pytest.mark.parametrize(("capability", "named"), [((8, 0), "8.0"), ((8, 9), "8.9"), (None, "an unknown one")])
def test_older_gpus_are_refused_with_what_they_have(capability: tuple[int, int] | None, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"9\.0 or higher .*{named}: leave it out"):
        batch_invariance("cuda", capability)


def test_rocm_computes_one_request_at_a_time_and_nine_in_ten_must_match() -> None:
    rules = batch_invariance("rocm", None)
    assert rules.arguments == {
        "enforce_eager": True,
        "attention_backend": "TRITON_ATTN",
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
    }
    assert rules.environment == {"VLLM_ROCM_USE_SKINNY_GEMM": "0"}
    assert rules.bar == 0.9


def test_this_machine_is_what_torch_was_built_for() -> None:
    built_for = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
    assert current_platform()[0] == built_for


def test_a_cpu_has_none_of_it() -> None:
    with pytest.raises(ConfigError, match="leave it out on a CPU"):
        engine_settings(default_model(), device="cpu", batch_invariant=True)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, platform: tuple[Any, Any], **wanted: Any) -> settings.EngineSettings:
    monkeypatch.setattr(settings, "_device", lambda device: "cuda")
    monkeypatch.setattr(platforms, "current_platform", lambda: platform)
    return engine_settings(default_model(), **wanted)


def test_the_rules_of_rocm_win_over_what_an_engine_has_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_a_gpu(monkeypatch, ("rocm", None), batch_invariant=True, max_num_seqs=64, seed=3)
    for name, value in batch_invariance("rocm", None).arguments.items():
        assert made.arguments[name] == value
    assert made.arguments["seed"] == 3  # an engine's seed is fixed anyway
    assert "VLLM_BATCH_INVARIANT" not in made.environment
    words = made.command_line()
    assert words[words.index("--attention-backend") + 1] == "TRITON_ATTN"
    assert "TRITON_ATTN" in AttentionBackendEnum.__members__
    assert set(made.arguments) <= set(AsyncEngineArgs.__dataclass_fields__)


@pytest.mark.parametrize(
    ("wanted", "backend"), [({}, "rlenv_ipc"), ({"transport": "nccl"}, "rlenv_nccl"), ({"transport": "shm"}, "shm")]
)
def test_weights_reach_a_gpu_by_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], backend: str
) -> None:
    made = on_a_gpu(monkeypatch, ("cuda", (9, 0)), **wanted)
    assert made.transport == backend
    assert f'{{"backend": "{backend}"}}' in made.command_line()
    assert made.arguments["enforce_eager"] is False


def test_ray_places_ranks_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="leave data_parallel_backend='ray' out"):
        engine_settings(default_model(), device="cpu", data_parallel_size=2, data_parallel_backend="ray")
    made = on_a_gpu(monkeypatch, ("cuda", (9, 0)), data_parallel_size=2, data_parallel_backend="ray")
    assert (made.arguments["data_parallel_size"], made.arguments["data_parallel_backend"]) == (2, "ray")
    assert "data_parallel_address" not in on_a_gpu(monkeypatch, ("cuda", (9, 0)), data_parallel_size=2).arguments


def test_ranks_are_looked_for_where_ray_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "203.0.113.7")  # where vLLM would look
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "192.0.2.2")
    made = on_a_gpu(monkeypatch, ("cuda", (9, 0)), data_parallel_size=2, data_parallel_backend="ray")
    assert made.arguments["data_parallel_address"] == "192.0.2.2"


def test_an_engine_on_a_cpu_takes_no_weights_from_gpus() -> None:
    with pytest.raises(ConfigError, match="leave transport='nccl' out"):
        engine_settings(default_model(), device="cpu", transport="nccl")
