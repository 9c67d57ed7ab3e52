"""Settings that cannot work are answered with one line that says what to type instead."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from rlenv.agents.config import TrainConfig, check_surroundings
from rlenv.agents.learner_link import _environment
from rlenv.agents.learner_types import LearnerConfig
from rlenv.agents.parts import learner_config, open_parts
from rlenv.engine.transfer.plugin import IPC, NCCL, SHARED_MEMORY
from rlenv.errors import ConfigError
from rlenv.models import default_model


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"group_size": 1}, "--group-size 2"),
        ({"staleness": -1}, "--staleness 0"),
        ({"steps": 0}, "--steps 1"),
        ({"groups_per_step": 0}, "--groups-per-step 1"),
        ({"lr": 0.0}, "--lr"),
        ({"lr": float("nan")}, "--lr"),
        ({"temperature": 0.0}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.5}, "--top-p"),
        ({"top_k": -1}, "--top-k 0"),
        ({"max_tokens": 0}, "--max-tokens 1"),
        ({"seed": -1}, "--seed 0"),
        ({"eval_problems": -1}, "--eval-problems 0"),
        ({"mode": "asynch"}, "sync, one-step-off, async"),
        ({"device": "tpu"}, "auto, cpu, cuda"),
        ({"learner_gpu": 0}, "--learner-gpu 1"),
    ],
)
def test_a_setting_that_cannot_work_says_what_to_type(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(advice)) as caught:
        TrainConfig("math-v0", **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"task": "maths-v0"}, "math-v0"),
        ({"model": "/no/such/folder"}, "--model"),
        ({"model": "no_such_folder"}, "--model"),
        ({"model": "tests/no_such_folder"}, "--model"),
        ({"model": "tests"}, "config.json"),
        ({"device": "cuda"}, "--device cpu"),
        ({"learner_gpu": 1}, "leave --learner-gpu out"),
        ({"learner_gpu": 1, "device": "cpu"}, "this run is on a CPU"),
        ({"run_dir": "pyproject.toml/run"}, "--run-dir"),
    ],
)
def test_surroundings_that_do_not_fit_say_what_to_type(
    settings: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(advice)) as caught:
        check_surroundings(TrainConfig(**{"task": "math-v0", **settings}))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_neither_a_folder_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: Any, name: str, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    with pytest.raises(ConfigError, match="nor on the Hub"):
        check_surroundings(TrainConfig("math-v0", model="nobody/nothing"))


def test_settings_that_fit_pass(tmp_path: Path) -> None:
    check_surroundings(TrainConfig("math-v0", model=default_model(), device="cpu", run_dir=str(tmp_path / "a" / "b")))


def test_the_bound_on_staleness_follows_the_mode() -> None:
    bounds = {
        mode: TrainConfig("t", mode=mode, staleness=5).staleness_bound for mode in ("sync", "one-step-off", "async")
    }
    assert bounds == {"sync": 0, "one-step-off": 1, "async": 5}


def test_the_dict_of_a_config_holds_every_setting() -> None:
    config = TrainConfig("t")
    assert config.to_dict() == dataclasses.asdict(config)


def test_bf16_heads_are_refused_where_everything_is_in_fp32() -> None:
    async def start() -> None:
        async with open_parts(TrainConfig("math-v0", device="cpu", fp32_head=False)):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="leave --no-fp32-head out"):
        asyncio.run(start())


def test_a_learner_with_a_gpu_of_its_own_gets_weights_out_by_nccl() -> None:
    shared, alone = (TrainConfig("math-v0", learner_gpu=gpu) for gpu in (None, 1))
    assert learner_config(shared, "m", "cuda").transfer_backend == IPC
    assert learner_config(shared, "m", "cpu").transfer_backend == SHARED_MEMORY
    settings = learner_config(alone, "m", "cuda")
    assert (settings.transfer_backend, settings.gpu) == (NCCL, 1)


@pytest.mark.parametrize(("visible", "left"), [(None, "1"), ("2,5", "5"), ("GPU-a,GPU-b", "GPU-b")])
def test_a_learner_sees_no_other_gpu_than_its_own(
    visible: str | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _environment(LearnerConfig("m", device="cuda", gpu=1))["CUDA_VISIBLE_DEVICES"] == left
    assert _environment(LearnerConfig("m", device="cuda")).get("CUDA_VISIBLE_DEVICES") == visible
