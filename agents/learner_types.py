"""What a learner is told and what it answers: plain data that crosses to its process, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from rlenv.engine.base import HeadDtype
from rlenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The clipped surrogate's range [1 − clip_low, 1 + clip_high] and the cap on importance weights.

    `math.inf` switches a bound off. Which ratio each one acts on is said in `rlenv.agents.losses`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    weight_cap: float = 2.0

    def __post_init__(self) -> None:
        if not (self.clip_low > 0 and self.clip_high > 0):
            raise ConfigError(f"clip_low {self.clip_low} and clip_high {self.clip_high} must be > 0, e.g. 0.2 and 0.28")
        if not self.weight_cap >= 1:
            raise ConfigError(f"weight_cap {self.weight_cap} must be at least 1, e.g. 2.0")


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which distribution the learner's log-probs are of. The defaults are right: that which was sampled from.

    Anything else is a mistake which training code has made, and which `rlenv audit` recognises and prices:
    logits that are not divided by the sampling temperature, a log-softmax over ids that top-p and top-k had
    taken out, an output head that multiplies in another precision than the engine's.
    """

    temperature: bool = True
    support: bool = True
    head: HeadDtype = "float32"


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How a model is trained.

    `model` is a folder or an id that transformers loads. `lr` rises linearly over the first `warmup_steps`
    optimizer steps, then stays. One update makes `minibatches` optimizer steps, each on its own share of
    the rows. `micro_batch_tokens` bounds the padded ids in one forward. `threads` are torch's, on a CPU.
    `gpu` is the number of the GPU it has for itself; None leaves it on the first, with whatever else computes there.
    `engine_ops`, on a GPU, computes log-probs by the kernels of a batch-invariant bf16 engine (`rlenv.agents.exact`).
    `sender` ("module:class") moves the weights to the engine by `transfer_backend`, in `transfer_dtype`.
    """

    model: str
    device: Literal["cpu", "cuda"] = "cpu"
    gpu: int | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    scoring: Scoring = field(default_factory=Scoring)
    engine_ops: bool = False
    lr: float = 1e-5
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    minibatches: int = 1
    micro_batch_tokens: int = 2048
    seed: int = 0
    threads: int = 1
    loss: LossConfig = field(default_factory=LossConfig)
    sender: str = "rlenv.engine.transfer.sender:ModelSender"
    transfer_backend: str = "shm"
    transfer_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "minibatches", "micro_batch_tokens", "threads"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} {value} must be above 0")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps {self.warmup_steps} must be at least 0")
        if self.engine_ops and self.device == "cpu":
            raise ConfigError("engine_ops needs a GPU of compute capability 9.0: leave it out with device='cpu'")
        if self.engine_ops and self.scoring != Scoring():
            raise ConfigError("engine_ops computes what a right engine does: leave scoring as it is by default")


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Learner against behaviour over some live tokens, at the weights that an update started from.

    With r = exp(learner − behaviour): `ratio_mean` of r; `kl`, the mean of r − 1 − log r, estimates
    KL(behaviour ‖ learner) in nats (k3 of http://joschu.net/blog/kl-approx.html); `ess` is the effective
    sample size (Σr)² / (n Σr²), 1 at best; `abs_mean` and `abs_max` are of |log r|; `clip_fraction` is the
    share of tokens whose gradient the clip removed. Log r is clamped to ±20 in the first three.
    """

    tokens: int
    ratio_mean: float
    kl: float
    ess: float
    abs_mean: float
    abs_max: float
    clip_fraction: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One update, as it went. `version` is that of the weights after it.

    `loss` and `entropy` (nats) are means over live tokens, `grad_norm` is that before clipping (the mean
    over optimizer steps). `fresh` covers the tokens that the very weights of the update's start sampled, so
    that it is the mismatch of backends; `stale` covers all others, so that it is off-policyness. Each is
    None without such tokens. `by_staleness` splits both: "0", "1", …, "4+" versions, and "stale_context".
    """

    version: int
    loss: float
    grad_norm: float
    lr: float
    rows: int
    tokens: int
    entropy: float
    clip_fraction: float
    frac_zero_std: float
    fresh: RatioStats | None
    stale: RatioStats | None
    by_staleness: dict[str, RatioStats]
    seconds: float
