"""What a person types becomes one checked `TrainConfig`, or a `ConfigError` that says what to type instead.

Checks that need nothing but the values run when the object is made; `check_surroundings` looks at the rest: whether
the task is registered, the model is there, the device exists, and the run folder can be written.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from rlenv.engine.base import HeadDtype, PauseMode
from rlenv.errors import ConfigError
from rlenv.types import Sample

Mode = Literal["sync", "one-step-off", "async"]
Device = Literal["auto", "cpu", "cuda"]
ConstantGroups = Literal["keep", "filter", "resample"]
OnCollapse = Literal["warn", "stop"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run.

    >>> TrainConfig("math-v0", steps=60, staleness=1).staleness_bound
    1
    """

    task: Annotated[str, tyro.conf.arg(metavar="TASK")]
    """Task id, as `rlenv list` prints it, or the id of any text environment registered with Gymnasium."""
    model: str | None = None
    """Folder of a transformers model, or its name on the Hub. Left out, the tiny model that ships with rlenv."""
    steps: int = 200
    """Optimizer steps; each consumes one batch and ends in one weight update."""
    groups_per_step: int = 32
    """Groups in a batch."""
    group_size: int = 8
    """Rollouts of one task at one seed, which share a baseline."""
    constant_groups: ConstantGroups = "keep"
    """What becomes of groups whose rewards are all equal, which teach nothing. keep: they stay in the batch, at
    advantage 0. filter: they are left out of it. resample: others take their place (DAPO's dynamic sampling)."""
    mode: Mode = "async"
    """sync: rollouts and updates alternate. one-step-off: a batch is sampled while the one before it is trained on.
    async: rollouts never stop, and weights are swapped under them."""
    staleness: int = 2
    """Bound on the lag, in versions, of every token that is trained on; read in async mode."""
    pause: PauseMode = "keep"
    """What becomes of rollouts in flight when weights are swapped: keep them, wait for them, or abort them."""
    clear_cache: bool = True
    """Recompute at a swap, under the new weights, the keys and values of rollouts that are kept."""
    lr: float = 5e-5
    """Learning rate of AdamW."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts."""
    top_p: float = 1.0
    """Least probability of the likeliest ids that training rollouts sample from; 1 leaves all."""
    top_k: int = 0
    """How many of the likeliest ids training rollouts sample from; 0 leaves all."""
    max_tokens: int | None = None
    """Most ids sampled in a turn; left out, what the context leaves."""
    seed: int = 0
    """Seeds task order, sampling and the learner."""
    run_dir: str = "runs/train"
    """Folder for metrics, curves and the trained model. An earlier run there is moved aside, never overwritten."""
    save_trajectories: bool = False
    """Keep every training rollout, with its exact ids, in parquet files in the run folder; see `rlenv replay`."""
    device: Device = "auto"
    """Where engine and learner compute."""
    learner_gpu: int | None = None
    """Which GPU the learner has for itself, 1 for the second; the engine has the first, and weights go by NCCL. Left
    out, both share one."""
    eval_problems: int = 512
    """Held-out problems evaluated before and after, once at temperature 1 and once greedily; 0 leaves that out."""
    eval_every: int = 0
    """Evaluate on them during training, too, at temperature 1, after every so many steps; 0 leaves that out."""
    fp32_head: bool = True
    """Multiply the output head in fp32, in engine and learner alike; otherwise both do so in bf16."""
    force: bool = False
    """Train even if the audit before the first update finds that engine and learner disagree."""
    on_collapse: OnCollapse = "warn"
    """What to do when the ratios of an update show that sampling and learning have parted ways."""
    shuffle_rewards: bool = False
    """Control run: rewards change owners at random within a batch, so that nothing can be learned from them."""

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("groups_per_step", self.groups_per_step, 1)
        if self.group_size < 2:
            raise ConfigError(
                f"group size {self.group_size} leaves no baseline: type --group-size 2 or more (8 is usual)"
            )
        _one_of("mode", self.mode, Mode)
        _one_of("pause", self.pause, PauseMode)
        _one_of("device", self.device, Device)
        _one_of("constant_groups", self.constant_groups, ConstantGroups)
        _one_of("on_collapse", self.on_collapse, OnCollapse)
        _at_least("staleness", self.staleness, 0)
        if self.learner_gpu is not None:
            _at_least("learner_gpu", self.learner_gpu, 1)
        _positive("lr", self.lr)
        _positive("temperature", self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}: type --top-p with a number above 0, at most 1")
        _at_least("top_k", self.top_k, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
        _at_least("seed", self.seed, 0)
        _at_least("eval_problems", self.eval_problems, 0)
        _at_least("eval_every", self.eval_every, 0)

    @property
    def sample(self) -> Sample:
        """How training rollouts are sampled."""
        return Sample(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens)

    @property
    def head(self) -> HeadDtype:
        return "float32" if self.fp32_head else "bfloat16"

    @property
    def staleness_bound(self) -> int:
        """η: the most versions that any trained token may be behind."""
        return {"sync": 0, "one-step-off": 1, "async": self.staleness}[self.mode]

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def check_surroundings(config: TrainConfig) -> None:
    """Raise ConfigError if the task, the model, the device or the run folder cannot serve this run."""
    import rlenv

    rlenv.spec(config.task)
    if config.model is not None:
        _check_model(config.model)
    if config.device == "cuda":
        _check_cuda()
    if config.learner_gpu is not None:
        _check_gpu(config.learner_gpu, config.device)
    _check_run_dir(Path(config.run_dir))


def _check_model(model: str) -> None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"no model in {model}: type the folder that holds its config.json")
        return
    advice = "type --model with a folder that holds a config.json, or leave it out for the default model"
    parts = model.split("/")
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(parts[0]).exists()
    if not hub_name:
        raise ConfigError(f"no model folder {model}: {advice}")
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        HfApi().model_info(model, timeout=5)
    except Exception as error:  # whatever went wrong, the model cannot be had; which types arise depends on the client
        raise ConfigError(f"no model {model}, neither as a folder nor on the Hub: {advice}") from error


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("device cuda needs an NVIDIA GPU, and none is visible here: type --device cpu")


def _check_gpu(number: int, device: Device) -> None:
    import torch

    count = 0 if device == "cpu" else torch.cuda.device_count()
    if number >= count:
        have = "this run is on a CPU" if not count else "there is one" if count == 1 else f"there are {count}"
        raise ConfigError(f"the learner cannot have GPU {number}, as {have}: leave --learner-gpu out")


def _check_run_dir(folder: Path) -> None:
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"cannot write a run to {folder}: type --run-dir with a folder that you may write to")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}: type {_option(name)} {least} or more")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is {value}: type {_option(name)} with a number above 0")


def _one_of(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}: type {_option(name)} with one of {', '.join(get_args(choices))}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
