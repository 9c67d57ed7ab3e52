"""Engine and learner in bf16, token by token: how far their log-probs are apart with and without the engine's ops.

    python -m benchmarks.exact_ops --model DIR --tokens 10000 --out exact.json

Needs one H100 or H200. A batch-invariant engine samples at temperature 1 with many prompts in flight; each of two
learners then scores those ids in a process of its own, since batch invariance is a matter of whole processes: one
under bf16 autocast with an fp32 head, and one with the engine's ops. Diagnostics are printed before, and name the first
op whose bits differ; each fails by itself, with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import exact_trace
from benchmarks.exact_trace import TracedEngine
from rlenv.agents.corrections import RatioTable
from rlenv.agents.exact import ExactPolicy
from rlenv.agents.hardware import hardware, versions
from rlenv.agents.learner import Learner
from rlenv.agents.learner_types import LearnerConfig
from rlenv.agents.packing import Batch, MicroBatch, micro_batches, rows_to_score
from rlenv.agents.policy import Policy
from rlenv.engine.kernels import vllm_kernels
from rlenv.engine.vllm import VLLMEngine
from rlenv.render import Renderer
from rlenv.types import Completion, Sample

IN_FLIGHT = 64  # at least
LENGTHS = range(32, 161, 16)  # tokens of a request
CONTEXT = 1024
MICRO_BATCH_TOKENS = 16_384
PASSES = 5  # timed, after one that warms up
TARGET_KL = 1e-6
Kind = Literal["autocast", "engine_ops"]
KINDS: tuple[Kind, ...] = ("autocast", "engine_ops")
Findings = dict[str, Any]  # of each diagnostic, what it found, or its traceback


@dataclass(frozen=True)
class Job:
    """What a learner's process is told."""

    kind: Kind
    model: str
    device: str
    batch: Batch
    gradients: Path


@dataclass(frozen=True)
class Answer:
    """`learner` and `behaviour` are log-probs [L] of the live tokens; `first` [L] marks a request's first one."""

    learner: np.ndarray
    behaviour: np.ndarray
    first: np.ndarray
    forward_s: float
    step_s: float  # forward and backward
    peak_gib: float


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates, completions, trace, findings = sample(arguments, folder)
        batch = make_batch(completions, arguments.temperature)
        jobs = {kind: Job(kind, arguments.model, "cuda", batch, folder / kind) for kind in KINDS}
        findings |= diagnose({}, "diagnostics", lambda: in_process(examine, jobs["engine_ops"], trace))
        show_findings(findings)
        answers = {kind: in_process(score, job) for kind, job in jobs.items()}
        gradients = diagnose(
            {}, "gradients", lambda: exact_trace.compare_gradients(*(job.gradients for job in jobs.values()))
        )
        show_findings(gradients)
    result = {
        "learner": {kind: summarise(answer) for kind, answer in answers.items()},
        "engine_tokens_per_s": rates,
        "findings": findings | gradients,
        "requests": len(completions),
        "settings": {key: value for key, value in vars(arguments).items() if key != "out"},
        "hardware": hardware("cuda"),
        "versions": versions(),
    }
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    return show(result)


def sample(
    arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, float], list[Completion], tuple[Completion, Path] | None, Findings]:
    """Tokens per second of both engines, the batch-invariant one's completions, and the trace of one request."""
    rates: dict[str, float] = {}
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": CONTEXT}
    if not arguments.skip_default_engine:
        with VLLMEngine(arguments.model, **settings) as engine:
            rates["default"], _ = generate(engine, arguments)
    with TracedEngine(arguments.model, batch_invariant=True, **settings) as engine:
        rates["batch_invariant"], completions = generate(engine, arguments)
        # Ids that no earlier prompt begins with, so that none of them is read from the prefix cache.
        prompt = torch.randint(len(engine.tokenizer), (90,), generator=torch.Generator().manual_seed(0)).tolist()
        path = folder / "trace"
        traced: list[tuple[Completion, Path]] = []
        findings = diagnose({}, "trace", lambda: traced.append((engine.trace(prompt, 60, path), path)))
    return rates, completions, traced[0] if traced else None, findings


def generate(engine: VLLMEngine, arguments: argparse.Namespace) -> tuple[float, list[Completion]]:
    """All requests at once, after a short warm-up: tokens per second, and the completions."""
    renderer = Renderer(engine.tokenizer)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(IN_FLIGHT)]
    while sum(lengths) < arguments.tokens:
        lengths.append(LENGTHS[len(lengths) % len(LENGTHS)])
    prompts = [
        renderer.start([{"role": "user", "content": f"{'Think aloud. ' * (i % 7)}What is {17 + 5 * i}·{83 + 3 * i}?"}])
        for i in range(len(lengths))
    ]
    for tokens in ([8] * len(lengths), lengths):
        began = time.perf_counter()
        futures = [
            engine.submit(prompt, Sample(temperature=arguments.temperature, max_tokens=count, ignore_eos=True))
            for prompt, count in zip(prompts, tokens, strict=True)
        ]
        completions = [future.result() for future in futures]
    return sum(lengths) / (time.perf_counter() - began), completions


def make_batch(completions: Sequence[Completion], temperature: float) -> Batch:
    """The completions as a batch of fresh rows, with advantages of either sign."""
    batch = rows_to_score([completion.prompt_ids + completion.token_ids for completion in completions])
    live, behaviour = np.zeros_like(batch.live), np.zeros_like(batch.behaviour)
    for end, completion in zip(batch.offsets[1:], completions, strict=True):
        live[end - len(completion.token_ids) : end] = True
        behaviour[end - len(completion.token_ids) : end] = completion.logprobs
    return replace(
        batch,
        live=live,
        behaviour=behaviour,
        live_tokens=int(live.sum()),
        advantages=np.where(np.arange(batch.rows) % 2, 1.0, -1.0).astype(np.float32),
        sampling=np.tile(np.asarray([temperature, 1, 0], np.float32), (len(batch.token_ids), 1)),
    )


def score(job: Job) -> Answer:
    """Log-probs, gradients and times of one learner."""
    policy, micros = _policy(job), list(micro_batches(job.batch, MICRO_BATCH_TOKENS))
    autocast = torch.autocast(job.device, torch.bfloat16, enabled=job.kind == "autocast")
    with torch.no_grad(), autocast:
        learner = torch.cat([policy(*_inputs(micro, job.device))[0] for micro in micros]).cpu().numpy()
    step_s = _seconds(job.device, lambda: _backward(policy, micros, job, autocast))
    torch.save({name: p.grad.cpu() for name, p in policy.named_parameters() if p.grad is not None}, job.gradients)
    with torch.no_grad(), autocast:
        forward_s = _seconds(job.device, lambda: [policy(*_inputs(micro, job.device)) for micro in micros])
    peak = torch.cuda.max_memory_allocated() / 2**30 if job.device == "cuda" else 0.0
    return Answer(
        learner=learner,
        behaviour=np.concatenate([micro.behaviour for micro in micros]),
        first=np.concatenate([(micro.live & (micro.live.cumsum(1) == 1))[micro.live] for micro in micros]),
        forward_s=forward_s,
        step_s=step_s,
        peak_gib=peak,
    )


def summarise(answer: Answer) -> dict[str, Any]:
    """Ratio and KL of all tokens, and the shares of tokens whose bits are equal."""
    equal = answer.learner == answer.behaviour
    difference = torch.from_numpy(answer.learner.astype(np.float64) - answer.behaviour)
    table, zeros = RatioTable(torch.device("cpu")), torch.zeros(len(difference), dtype=torch.int64)
    table.add(zeros, difference, zeros, zeros)
    stats = table.of("0")
    assert stats is not None
    return {
        "tokens": stats.tokens, "k3_kl": stats.kl, "ratio_mean": stats.ratio_mean, "abs_mean": stats.abs_mean,
        "abs_max": stats.abs_max, "bitwise_equal": float(equal.mean()),
        "bitwise_equal_first": float(equal[answer.first].mean()),
        "bitwise_equal_later": float(equal[~answer.first].mean()),
        "forward_s": answer.forward_s, "forward_backward_s": answer.step_s, "peak_gib": answer.peak_gib,
    }  # fmt: skip


def examine(job: Job, trace: tuple[Completion, Path] | None) -> Findings:
    """Every diagnostic of the engine's ops: each kernel by itself, then all of them against the engine's modules."""
    policy = _policy(job)
    model, kernels, device = policy.model, vllm_kernels(), torch.device(job.device)
    findings: Findings = {}
    with torch.no_grad():
        for name, case in exact_trace.cases(kernels, model).items():
            diagnose(findings, f"rows of {name}", functools.partial(exact_trace.varying_sizes, case))
        diagnose(
            findings,
            "attention, decoded against prefilled",
            lambda: exact_trace.decoded_is_prefilled(kernels, model.config, device),
        )
        if trace is not None:
            diagnose(findings, "engine against learner", lambda: exact_trace.compare(kernels, model, *trace))
        diagnose(findings, "rows alone", lambda: _alone(policy, job))
    return diagnose(findings, "learner step", lambda: _learner_step(job))


def diagnose(findings: Findings, name: str, finding: Callable[[], Any]) -> Findings:
    """Add what a diagnostic found, or its traceback: one that fails hides no other. Findings in whole are merged."""
    try:
        found = finding()
    except Exception:
        found = traceback.format_exc().splitlines()
    if found is not None:
        findings |= found if isinstance(found, dict) else {name: found}
    return findings


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def show_findings(findings: Findings) -> None:
    for name, lines in findings.items():
        print(f"── {name}", *(lines if isinstance(lines, list) else [lines]), sep="\n   ", flush=True)


def show(result: dict[str, Any]) -> int:
    """Print the comparison; 0 when the engine's ops reach the target."""
    learners = result["learner"]
    print(f"{'learner':22}", *(f"{kind:>15}" for kind in learners))
    for key in learners["autocast"]:
        print(f"{key:22}", *(f"{learners[kind][key]:15.6g}" for kind in learners))
    rates = result["engine_tokens_per_s"]
    print("engine tokens/s", *(f"{name} {rate:.0f}" for name, rate in rates.items()), sep="  ")
    slower = learners["engine_ops"]["forward_backward_s"] / learners["autocast"]["forward_backward_s"]
    kl = learners["engine_ops"]["k3_kl"]
    passed = kl <= TARGET_KL
    print(f"{'PASS' if passed else 'FAIL'}: k3 KL {kl:.3g} with the engine's ops, at {slower:.2f} × the learner's time")
    return 0 if passed else 1


def _policy(job: Job) -> Policy:
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    return (ExactPolicy(model) if job.kind == "engine_ops" else Policy(model)).to(job.device)


def _alone(policy: Policy, job: Job) -> str:
    """Whether a row has the bits that it has in its micro-batch."""
    *_, micro = micro_batches(job.batch, MICRO_BATCH_TOKENS)
    row = int(micro.rows[0])
    whole, _ = policy(*_inputs(micro, job.device))
    alone, _ = policy(*_inputs(next(micro_batches(job.batch.select([row]), MICRO_BATCH_TOKENS)), job.device))
    return f"row {row} by itself: {'equal' if torch.equal(whole[: len(alone)], alone) else 'DIFFERENT'}"


def _learner_step(job: Job) -> list[str]:
    """One update of the learner itself, Accelerate and all: its own metrics on the same tokens."""
    learner = Learner(
        LearnerConfig(job.model, device="cuda", mixed_precision="bf16", engine_ops=True, micro_batch_tokens=8192)
    )
    metrics = learner.step(job.batch)
    return [f"{metrics.fresh}", f"gradient norm {metrics.grad_norm:.4g}, {metrics.seconds:.2f} s, the first of all"]


def _backward(
    policy: Policy, micros: Sequence[MicroBatch], job: Job, autocast: contextlib.AbstractContextManager[Any]
) -> None:
    policy.zero_grad()
    for micro in micros:
        with autocast:
            logprobs, _ = policy(*_inputs(micro, job.device))
        advantages = torch.from_numpy(micro.advantages).to(job.device)
        (-(logprobs * advantages).sum() / job.batch.live_tokens).backward()


def _seconds(device: str, call: Callable[[], Any]) -> float:
    """The median of some calls, after one that does not count."""
    times = []
    for _ in range(PASSES + 1):
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def _inputs(micro: MicroBatch, device: str) -> list[torch.Tensor]:
    arrays = (micro.token_ids, micro.attention_mask, micro.live, micro.sampling)
    return [torch.from_numpy(array).to(device) for array in arrays]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.exact_ops", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="the folder of a Llama or Qwen3")
    parser.add_argument("--tokens", type=int, default=10_000, help="at least so many are sampled")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--skip-default-engine", action="store_true", help="do not time an engine that is not invariant"
    )
    parser.add_argument("--out", help="where the JSON goes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
