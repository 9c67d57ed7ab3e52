"""benchmarks/exact_ops.py without its GPU: what it measures, and which op its diagnostics blame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rows import tiny_model
from torch import Tensor, nn

from benchmarks import exact_ops, exact_trace
from rlenv.agents import exact
from rlenv.agents.gradients import torch_kernels
from rlenv.agents.policy import Policy
from rlenv.engine.kernels import Kernels
from rlenv.types import Completion

PROMPT, SAMPLED = (5, 6, 7), (8, 9, 10, 11)
NAMES = [
    *(
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in (
            "input_layernorm", "self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.attn inputs",
            "self_attn.attn", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_up_proj", "mlp.act_fn",
            "mlp.down_proj",
        )
    ),
    "model.norm",
    "logits_processor",
]  # fmt: skip


@pytest.fixture
def kernels() -> Kernels:
    return torch_kernels(torch.float32)


def completion(prompt: tuple[int, ...], sampled: tuple[int, ...], model: Any) -> Completion:
    ids = torch.tensor([prompt + sampled])
    live = torch.arange(ids.shape[1])[None] >= len(prompt)
    with torch.no_grad():
        logprobs, _ = Policy(model)(
            ids, torch.ones_like(ids), live, torch.tensor([[1.0, 1.0, 0.0]]).expand(int(live.sum()), 3)
        )
    return Completion("request", prompt, sampled, tuple(logprobs.tolist()), (), "", "length")


def traced(kernels: Kernels, model: Any, path: Path) -> dict[str, list[list[Tensor]]]:
    """What a worker records that computes as the learner does: three rows prefilled, three decoded one by one."""
    calls = exact_trace._learner_calls(kernels, model, torch.tensor([PROMPT + SAMPLED[:-1]]), len(PROMPT))
    assert len(calls) == len(NAMES)
    trace = {}
    for name, (_, tensors) in zip(NAMES, calls, strict=True):
        sizes = [1, 1, 1, 1] if name == "logits_processor" else [3, 1, 1, 1]
        trace[name] = [list(parts) for parts in zip(*(tensor.split(sizes) for tensor in tensors), strict=True)]
    table = kernels.cos_sin(model.config, torch.device("cpu"))
    torch.save({"calls": trace, "table": table, "about": ["runner fake"]}, path)
    return trace


def test_a_trace_of_the_same_bits_blames_no_op(kernels: Kernels, tmp_path: Path) -> None:
    model = tiny_model()
    traced(kernels, model, tmp_path / "trace")
    lines = exact_trace.compare(kernels, model, completion(PROMPT, SAMPLED, model), tmp_path / "trace")
    assert "all ops equal" in lines and "rotary table: equal" in lines
    assert not any("DIFFER" in line for line in lines[:-1]), lines


def test_the_first_op_of_other_bits_is_named_with_its_row(kernels: Kernels, tmp_path: Path) -> None:
    model = tiny_model()
    trace = traced(kernels, model, tmp_path / "trace")
    trace["model.layers.1.self_attn.attn"][2][0][0, 1] += 0.5  # the second decoded row
    trace["model.norm"][3][0][0, 1] += 1
    saved = torch.load(tmp_path / "trace")
    torch.save(saved | {"calls": trace, "table": saved["table"] + 1}, tmp_path / "trace")
    lines = exact_trace.compare(kernels, model, completion(PROMPT, SAMPLED, model), tmp_path / "trace")
    blamed = [line for line in lines if line.startswith("DIFFERS")]
    first = "DIFFERS model.layers.1.self_attn.attn → attention[0]: 1 of 6 rows, the first is 4, max |Δ| 0.5"
    assert len(blamed) == 2 and blamed[0] == first
    assert "rotary table: DIFFERENT" in lines


def test_an_op_that_depends_on_the_batch_is_named_with_the_sizes(kernels: Kernels) -> None:
    def varying(gate_up: Tensor) -> Tensor:
        return kernels.silu_and_mul(gate_up) + (len(gate_up) in (8, 255))

    cases = exact_trace.cases(replace(kernels, silu_and_mul=varying), tiny_model())
    assert exact_trace.varying_sizes(cases["silu_and_mul"]) == "DIFFERENT in batches of [8, 255]"
    assert exact_trace.varying_sizes(cases["rms_norm"]) == "equal in batches of every size"


class Adder(nn.Module):
    """Changes its input in place, as the engine's norms do, and returns it beside None."""

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, None]:
        return x.add_(1), None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.attn, self.impl = Adder(), Adder(), "fake"
        self.cos_sin_cache = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.qkv_proj(x)
        return self.attn(x, 2 * x, 3 * x)[0]


def test_a_worker_records_results_before_later_modules_change_them(tmp_path: Path) -> None:
    class Runner:
        model = Attention()
        vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))

        def get_model(self) -> Attention:
            return self.model

    worker = exact_trace.TraceExtension()
    worker.model_runner = Runner()
    worker.rlenv_trace()
    for rows in (2, 1):
        worker.model_runner.model(torch.zeros(rows, 1))
    worker.rlenv_traced(str(tmp_path / "trace"))
    worker.model_runner.model(torch.zeros(1, 1))  # no longer recorded
    trace = torch.load(tmp_path / "trace")
    assert "cache blocks of 16 positions" in trace["about"]
    calls = trace["calls"]
    values = {name: [[tensor.tolist() for tensor in call] for call in recorded] for name, recorded in calls.items()}
    assert values == {
        "qkv_proj": [[[[1.0], [1.0]]], [[[1.0]]]],
        "attn inputs": [[[[1.0], [1.0]], [[2.0], [2.0]]], [[[1.0]], [[2.0]]]],
        "attn": [[[[2.0], [2.0]]], [[[2.0]]]],
    }


@pytest.fixture
def saved(tmp_path: Path) -> str:
    tiny_model().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("kind", exact_ops.KINDS)
def test_a_learner_is_scored_against_the_engine_token_by_token(
    kind: exact_ops.Kind, saved: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "vllm_kernels", lambda: kernels)
    monkeypatch.setattr(exact_ops, "PASSES", 1)
    model = tiny_model()
    completions = [completion(PROMPT, SAMPLED, model), completion((1, 2), (3, 4, 5, 6, 7, 8), model)]
    batch = exact_ops.make_batch(completions, 1.0)
    answer = exact_ops.score(exact_ops.Job(kind, saved, "cpu", batch, tmp_path / kind))
    assert answer.first.tolist() == [True, *[False] * 5, True, *[False] * 3]  # the longest row comes first
    assert answer.behaviour.tolist() == [*completions[1].logprobs, *completions[0].logprobs]
    summary = exact_ops.summarise(answer)
    assert summary["tokens"] == 10 and summary["forward_backward_s"] > 0
    assert (summary["abs_max"] < 1e-5) == (kind == "engine_ops")
    assert summary["k3_kl"] == pytest.approx(np.mean(np.exp(d := answer.learner - answer.behaviour) - 1 - d), abs=1e-6)


def test_shares_of_equal_bits_are_told_apart_by_first_and_later_tokens() -> None:
    behaviour = np.asarray([-1.0, -2.0, -3.0], dtype=np.float32)
    learner = behaviour + np.asarray([0.0, 0.0, 1e-6], dtype=np.float32)
    summary = exact_ops.summarise(exact_ops.Answer(learner, behaviour, np.asarray([True, False, False]), 1.0, 2.0, 0.0))
    shares = [summary[name] for name in ("bitwise_equal", "bitwise_equal_first", "bitwise_equal_later")]
    assert shares == [pytest.approx(2 / 3), 1.0, 0.5]


def test_gradients_are_compared_by_their_angle(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0])}, tmp_path / "first")
    torch.save({"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([1.0])}, tmp_path / "second")
    overall, least = exact_trace.compare_gradients(tmp_path / "first", tmp_path / "second")
    assert overall.startswith("cosine 0.500000") and least == "least 0.0000: a"


def test_a_diagnostic_that_fails_leaves_its_traceback_and_the_others() -> None:
    findings = exact_ops.diagnose({}, "good", lambda: ["equal"])
    exact_ops.diagnose(findings, "bad", lambda: 1 / 0)
    assert findings["good"] == ["equal"] and findings["bad"][-1] == "ZeroDivisionError: division by zero"
