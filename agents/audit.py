"""A model and settings enter; what each cause of mismatch costs, and which one this backend has, leave.

    sample on the task ─ diagnose ────────────────────────────── semantic        (what the log-probs are of)
    prompts fresh · cached · alone · across a weight swap ────── inference path  (how they were computed)
    one optimizer step ───────────────────────────────────────── objective       (no fault: what training corrects)

Each cause is measured in the backend as it is (`here`) and, all else being right, switched wrong alone (`alone`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import transformers

import rlenv
from rlenv.agents.advantages import score
from rlenv.agents.audit_config import AuditConfig
from rlenv.agents.diagnosis import MISTAKES, Verdict, diagnose
from rlenv.agents.evaluate import training
from rlenv.agents.learner import Learner
from rlenv.agents.learner_types import LearnerConfig, Scoring
from rlenv.agents.mismatch import Mismatch, measure
from rlenv.agents.packing import Batch, FloatArray, pack
from rlenv.agents.probes import ALONE, TOGETHER, Probes
from rlenv.agents.sampler import Sampler
from rlenv.bound import EngineBoundEnv
from rlenv.engine.backend import Backend
from rlenv.engine.vllm import VLLMEngine
from rlenv.errors import GroupError
from rlenv.models import default_model
from rlenv.rollout import EnvPool, rollout_group
from rlenv.types import Group, Sample

Layer = Literal["semantic", "inference path", "objective"]
GROUP_SIZE = 8
GROUPS_AT_ONCE = 8


def _silence(phase: str) -> None:
    """Nobody wants to be told."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause and what mends it. `here`: in the backend as it is; `alone`: with it wrong and all else right."""

    layer: Layer
    cause: str
    here: Mismatch | None
    alone: Mismatch | None
    mend: str
    blamed: bool = False


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The verdict over all, with every cause that was measured."""

    config: AuditConfig
    device: str
    dtype: str
    verdict: Verdict
    findings: tuple[Finding, ...]

    @property
    def blamed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.blamed]

    @property
    def passed(self) -> bool:
        return self.verdict.passed and not self.blamed


def audit(config: AuditConfig, tell: Callable[[str], None] = _silence) -> AuditResult:
    """Start an engine and a learner, measure, and end both; `tell` is told of each phase as it begins.

    Raises ConfigError, EngineError or GroupError.
    """
    model = config.model or default_model()
    device = None if config.device == "auto" else config.device
    tell("starting the engine")
    with VLLMEngine(model, device=device, seed=config.seed, backend=config.backend) as engine:
        learner = learner_of(config, engine)
        result = asyncio.run(audit_parts(engine, learner, config, tell))
    if config.full:
        result = replace(result, findings=result.findings + tuple(_restarts(config, model, learner, tell)))
    return result


async def audit_parts(
    engine: VLLMEngine, learner: Learner, config: AuditConfig, tell: Callable[[str], None] = _silence
) -> AuditResult:
    """Audit these two, which hold the same weights now, and hold them again in the end."""
    learner.version = engine.weight_version
    probes = Probes(engine, learner, config.seed)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    tell(f"sampling {config.tokens} ids on {config.task}")
    batch = await _sampled(engine, config)

    async def values(batch: Batch, scoring: Scoring) -> FloatArray:
        return learner.score(batch, scoring)

    tell(f"scoring {batch.live_tokens} ids by each distribution that they may be of")
    verdict = await diagnose(batch, values, learner.config.scoring, engine.dtype)
    proof = engine.proof
    engine.proof = proof and verdict.mismatch.within(engine.dtype)  # no canary would pass over such a gap
    findings = [*_semantic(verdict), *await _paths(probes, engine.dtype, config, tell)]
    learner.model.load_state_dict(before)
    await probes.update("keep", True)
    engine.proof = proof
    tell("one optimizer step")
    learner.step(batch)
    stale = measure(batch.behaviour[batch.live], learner.score(batch))
    learner.model.load_state_dict(before)
    findings.append(Finding("objective", "staleness 1", stale, None, "corrected by the loss; see --staleness"))
    return AuditResult(config, engine.device, engine.dtype, verdict, tuple(findings))


def _semantic(verdict: Verdict) -> list[Finding]:
    rows = [Finding("semantic", cause.name, cause.gap, None, cause.mend, blamed=True) for cause in verdict.causes]
    mends = {
        "raw log-probs": "logprobs_mode='processed_logprobs' in vLLM",
        "no temperature": "divide the learner's logits by the sampling temperature",
        "no top-p, top-k": "restrict the learner's log-softmax to the ids that were left",
        "bf16 output head": "an fp32 head on both sides",
    }
    return rows + [
        Finding("inference path" if "head" in name else "semantic", name, None, verdict.costs[name], mends[name])
        for name in MISTAKES
        if name in verdict.costs
    ]


async def _paths(probes: Probes, dtype: str, config: AuditConfig, tell: Callable[[str], None]) -> list[Finding]:
    engine, usual = probes.engine, (probes.engine.salted, probes.engine.proof)
    prompts = probes.prompts(TOGETHER)
    tell("prompts computed fresh, found in the cache, and alone in the batch")
    cold = await probes.together(prompts)

    def finding(cause: str, here: Mismatch | None, mend: str, alone: Mismatch | None = None) -> Finding:
        blamed = here is not None and not here.within(dtype) and here.abs_mean > 2 * cold.abs_mean
        return Finding("inference path", cause, here, alone, mend, blamed)

    cached, alone = await probes.together(prompts), await probes.alone(probes.prompts(ALONE))
    tell("a weight update under requests in flight")
    swap = await probes.swap(prompts, config.pause, config.clear_cache)
    tell("the same with stale keys and values, then with a stale prefix cache")
    engine.salted, engine.proof = True, False
    stale_kv = (await probes.swap(prompts, "keep", False)).in_flight
    engine.salted = False
    await probes.together(prompts)
    stale_prefix = (await probes.swap(prompts, "wait", False)).cached
    engine.salted, engine.proof = usual
    return [
        finding("kernels", cold, "engine_ops on a GPU: one set of kernels for both sides"),
        finding("prefix cache", cached, "enable_prefix_caching=False in vLLM"),
        finding("batch size", alone, "batch_invariant=True on a GPU"),
        finding("weight update", swap.fresh, "see docs/weight_updates.md"),
        finding("stale prefix cache", swap.cached, "clear the prefix cache at a swap, or salt it", stale_prefix),
        finding("stale keys and values", swap.in_flight, "pause with clear_cache=True", stale_kv),
    ]


def _restarts(config: AuditConfig, model: str, learner: Learner, tell: Callable[[str], None]) -> list[Finding]:
    """What an engine decides at its start, switched alone: scheduling and prefill the other way round, a bf16 head."""
    cuda = learner.config.device == "cuda"
    variants = {
        "async scheduling " + ("off" if cuda else "on"): Backend(async_scheduling=not cuda),
        "chunked prefill " + ("off" if cuda else "on"): Backend(chunked_prefill=not cuda),
        "prefix cache off": Backend(prefix_cache=False),
        "engine's head in bf16": Backend(head="bfloat16"),
    }
    findings = []
    for name, backend in variants.items():
        tell(f"another engine: {name}")
        with VLLMEngine(model, device=learner.config.device, seed=config.seed, backend=backend) as engine:
            batch = asyncio.run(_sampled(engine, replace(config, temperature=1.0, top_p=1.0, top_k=0)))
        scorings = {name: Scoring()}
        if backend.head == "bfloat16":
            scorings["both heads in bf16"] = Scoring(head="bfloat16")
        for cause, scoring in scorings.items():
            alone = measure(batch.behaviour[batch.live], learner.score(batch, scoring))
            findings.append(Finding("inference path", cause, None, alone, "the default"))
    return findings


async def _sampled(engine: VLLMEngine, config: AuditConfig) -> Batch:
    """Rollouts of the task, packed, until there are enough ids; a slow engine is not asked for many more."""
    groups: list[Group] = []
    agent = Sampler(
        Sample(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_tokens=config.max_tokens)
    )
    options = await asyncio.to_thread(training, config.task)

    def make() -> EngineBoundEnv:
        env = rlenv.make(config.task, engine=engine, **options)
        assert isinstance(env, EngineBoundEnv)
        return env

    sampled, of_a_group = 0, GROUP_SIZE * config.max_tokens
    with contextlib.closing(EnvPool(make)) as pool:
        while sampled < config.tokens:
            count = min(GROUPS_AT_ONCE, math.ceil((config.tokens - sampled) / of_a_group))
            ids = range(len(groups), len(groups) + count)
            groups += await asyncio.gather(
                *(rollout_group(pool, agent, id=id, seed=config.seed + id, group_size=GROUP_SIZE) for id in ids)
            )
            if not any(group.trajectories for group in groups):
                raise GroupError(f"every rollout of {config.task} failed: {groups[0].failures[0].message}")
            sampled = sum(sum(row.loss_mask) for group in groups for row in group.trajectories)
            of_a_group = max(1, sampled // len(groups))
    return pack(score(groups), version=engine.weight_version)


def learner_of(config: AuditConfig, engine: VLLMEngine) -> Learner:
    """The learner's side, in this process, as a training run on the engine's device has it."""
    cuda = engine.device == "cuda"
    transformers.utils.logging.disable_progress_bar()
    return Learner(
        LearnerConfig(
            model=engine.model,
            device="cuda" if cuda else "cpu",
            mixed_precision="bf16" if cuda else "no",
            scoring=config.scoring,
            lr=config.lr,
            seed=config.seed,
        )
    )
