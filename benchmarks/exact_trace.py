"""One request through the engine's modules and the learner's kernels enters; the first op whose bits differ leaves.

The worker records what each module of vLLM's model returned, prefill and decode alike; `compare` runs the learner's
kernels over the same ids, in the same order. `varying_sizes` asks a kernel for the same rows in batches of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlenv.agents.exact import ExactPolicy
from rlenv.engine.kernels import Kernels, Rows
from rlenv.engine.transfer.worker import ProofExtension
from rlenv.engine.vllm import VLLMEngine
from rlenv.types import Completion, Sample

RECORDED = (
    "input_layernorm", "qkv_proj", "q_norm", "k_norm", "attn", "o_proj", "post_attention_layernorm", "gate_up_proj",
    "act_fn", "down_proj", "norm", "logits_processor",
)  # fmt: skip
OPS = ("linear", "rms_norm", "add_rms_norm", "rotary", "attention", "silu_and_mul", "head")
WHOLE = 2048  # rows of the largest batch
SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 255, 256, 257, 1024)


class TraceExtension(ProofExtension):
    """Records in the worker what the modules of its model return, by name and in the order of their first call."""

    def rlenv_trace(self) -> None:
        self._trace_calls: dict[str, list[list[Tensor]]] = {}
        self._trace_hooks = []
        for name, module in self.model_runner.get_model().named_modules():
            leaf = name.rpartition(".")[2]
            if leaf == "attn":  # the rotary module is one for all layers: its results are seen where they go in
                self._trace_hooks.append(module.register_forward_pre_hook(self._keep_inputs(f"{name} inputs")))
            if leaf in RECORDED:
                self._trace_hooks.append(module.register_forward_hook(self._keep_outputs(name)))

    def rlenv_traced(self, path: str) -> None:
        """Stop, and write the calls, the rotary table and what runs the model."""
        for hook in self._trace_hooks:
            hook.remove()
        modules = list(self.model_runner.get_model().modules())
        tables = [module.cos_sin_cache for module in modules if hasattr(module, "cos_sin_cache")]
        attention = next(module.impl for module in modules if hasattr(module, "impl"))
        about = [
            f"runner {type(self.model_runner).__module__}",
            f"attention {type(attention).__name__} {getattr(attention, 'vllm_flash_attn_version', '?')}",
            f"cache blocks of {self.model_runner.vllm_config.cache_config.block_size} positions",
        ]
        torch.save({"calls": self._trace_calls, "table": tables[0].cpu(), "about": about}, path)

    def _keep_inputs(self, name: str) -> Callable[..., None]:
        def keep(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            self._trace_calls.setdefault(name, []).append(_tensors(arguments[:2]))

        return keep

    def _keep_outputs(self, name: str) -> Callable[..., None]:
        def keep(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._trace_calls.setdefault(name, []).append(_tensors(output if isinstance(output, tuple) else (output,)))

        return keep


class TracedEngine(VLLMEngine):
    """The engine, with a worker that can record."""

    worker_extension = "benchmarks.exact_trace.TraceExtension"

    def trace(self, prompt: Sequence[int], tokens: int, path: Path) -> Completion:
        """Sample `tokens` ids on their own, and write what every module returned to `path`."""
        self.start(self._llm.collective_rpc("rlenv_trace")).result()
        try:
            return self.generate_sync(prompt, Sample(max_tokens=tokens, ignore_eos=True))
        finally:
            self.start(self._llm.collective_rpc("rlenv_traced", args=(str(path),))).result()


@dataclass(frozen=True)
class Difference:
    """How one op's results differ: `rows` of `of_rows` do, `first_row` first, by `largest` at most."""

    name: str
    rows: int
    of_rows: int
    first_row: int
    largest: float

    def __str__(self) -> str:
        where = f"{self.rows} of {self.of_rows} rows, the first is {self.first_row}"
        return f"{self.name}: {where}, max |Δ| {self.largest:.3g}"


def compare(kernels: Kernels, model: Any, completion: Completion, path: Path) -> list[str]:
    """Findings, the first differing op before all others; "all ops equal" when there is none."""
    trace = torch.load(path)
    engine: dict[str, list[list[Tensor]]] = trace["calls"]
    ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]], device=model.device)
    learner = _learner_calls(kernels, model, ids, len(completion.prompt_ids))
    lines = [*trace["about"], f"{len(completion.prompt_ids)} rows are prefilled, the others decoded one by one"]
    table = kernels.cos_sin(model.config, model.device).cpu()
    lines.append(f"rotary table: {'equal' if torch.equal(table, trace['table'][: len(table)]) else 'DIFFERENT'}")
    if len(learner) != len(engine):
        lines.append(f"DIFFERENT numbers of ops: engine {len(engine)}, learner {len(learner)}")
    differences = list(_differences(engine, learner))
    lines += [f"DIFFERS {difference}" for difference in differences] or ["all ops equal"]
    logits = torch.cat([call[0] for call in engine[list(engine)[-1]]]).to(model.device)
    sampled = torch.tensor(completion.token_ids, device=model.device)
    scored = kernels.logprobs(logits[: len(sampled)].float(), sampled, torch.ones(len(sampled), device=model.device))
    equal = scored.tolist() == list(completion.logprobs)
    return [*lines, f"log-probs of the engine's own logits: {'equal' if equal else 'DIFFERENT'}"]


def cases(kernels: Kernels, model: Any) -> dict[str, Callable[[int], Tensor]]:
    """Each kernel at each shape that the model has: how many rows → their results, on the same noise every time."""
    layer, config = model.base_model.layers[0], model.config
    attention, mlp, norm, head = layer.self_attn, layer.mlp, layer.input_layernorm, model.get_output_embeddings()
    generator = torch.Generator(model.device).manual_seed(0)

    def noise(width: int, dtype: torch.dtype = kernels.dtype) -> Tensor:
        return torch.randn(WHOLE, width, device=model.device, generator=generator).to(dtype)

    def linear(*layers: Any) -> Callable[[int], Tensor]:
        weight = torch.cat([layer.weight for layer in layers]).to(kernels.dtype)
        x = noise(weight.shape[1])
        return lambda rows: kernels.linear(x[:rows], weight, None)

    hidden, residual, wide = noise(config.hidden_size), noise(config.hidden_size), noise(2 * config.intermediate_size)
    scale, epsilon = norm.weight.to(kernels.dtype), norm.variance_epsilon
    logits, ones = noise(config.vocab_size, torch.float32), torch.ones(WHOLE, device=model.device)
    targets = torch.arange(WHOLE, device=model.device) % config.vocab_size
    return {
        "qkv": linear(attention.q_proj, attention.k_proj, attention.v_proj),
        "o": linear(attention.o_proj),
        "gate_up": linear(mlp.gate_proj, mlp.up_proj),
        "down": linear(mlp.down_proj),
        "rms_norm": lambda rows: kernels.rms_norm(hidden[:rows], scale, epsilon),
        "add_rms_norm": lambda rows: kernels.add_rms_norm(hidden[:rows], residual[:rows], scale, epsilon)[0],
        "silu_and_mul": lambda rows: kernels.silu_and_mul(wide[:rows]),
        "head": lambda rows: kernels.head(hidden[:rows], head.weight, head.bias),
        "logprobs": lambda rows: kernels.logprobs(logits[:rows], targets[:rows], ones[:rows]),
    }


def varying_sizes(case: Callable[[int], Tensor]) -> str:
    """The batch sizes in which the first rows have other bits than in a batch of WHOLE."""
    whole = case(WHOLE)
    varying = [size for size in SIZES if not torch.equal(case(size), whole[:size])]
    return f"DIFFERENT in batches of {varying}" if varying else "equal in batches of every size"


def decoded_is_prefilled(kernels: Kernels, config: Any, device: torch.device, length: int = 400) -> str:
    """The first position at which FlashAttention gives other bits for one query over a cache than for a whole row."""

    def noise(heads: int) -> Tensor:
        return torch.randn(length, heads, config.head_dim, device=device, generator=generator).to(kernels.dtype)

    generator = torch.Generator(device).manual_seed(0)
    query = noise(config.num_attention_heads)
    key, value = noise(config.num_key_value_heads), noise(config.num_key_value_heads)
    whole = torch.ones(1, length, dtype=torch.bool, device=device)
    prefilled, decoded = (kernels.attention(query, key, value, Rows(whole, one)) for one in (~whole, whole))
    differing = (prefilled != decoded).flatten(1).any(1).nonzero()[:, 0].tolist()
    return f"other bits at {len(differing)} of {length} positions, the first is {differing[:1]}"


def compare_gradients(first: Path, second: Path) -> list[str]:
    """The cosine of both learners' gradients, over all parameters, and the parameter with the smallest."""
    gradients = [torch.load(path) for path in (first, second)]
    dots, norms = {}, [0.0, 0.0]
    for name, ours in gradients[0].items():
        pair = [ours.double().flatten(), gradients[1][name].double().flatten()]
        norms = [total + gradient.square().sum().item() for total, gradient in zip(norms, pair, strict=True)]
        dots[name] = (pair[0].dot(pair[1]).item(), pair[0].norm().item() * pair[1].norm().item())
    cosine = sum(dot for dot, _ in dots.values()) / (norms[0] * norms[1]) ** 0.5
    worst = min(dots, key=lambda name: dots[name][0] / max(dots[name][1], 1e-30))
    least = dots[worst][0] / max(dots[worst][1], 1e-30)
    return [
        f"cosine {cosine:.6f}, norms {norms[0] ** 0.5:.6g} and {norms[1] ** 0.5:.6g}",
        f"least {least:.4f}: {worst}",
    ]


def _learner_calls(kernels: Kernels, model: Any, ids: Tensor, prompt: int) -> list[tuple[str, list[Tensor]]]:
    calls: list[tuple[str, list[Tensor]]] = []

    def recorded(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            output = getattr(kernels, name)(*arguments)
            calls.append((name, _tensors(output if isinstance(output, tuple) else (output,))))
            return output

        return call

    recorders: dict[str, Any] = {name: recorded(name) for name in OPS}
    policy = ExactPolicy(model, kernels=replace(kernels, **recorders))
    padded = F.pad(ids, (0, 1))  # the last id of a row is only ever a target
    live = (torch.arange(padded.shape[1], device=ids.device) >= prompt)[None]
    with torch.no_grad():
        sampling = torch.tensor([[1.0, 1.0, 0.0]], device=ids.device).expand(int(live.sum()), 3)
        policy(padded, torch.ones_like(padded), live, sampling)
    return calls


def _differences(
    engine: dict[str, list[list[Tensor]]], learner: list[tuple[str, list[Tensor]]]
) -> Iterator[Difference]:
    for (name, calls), (kernel, results) in zip(engine.items(), learner, strict=False):
        for number, result in enumerate(results):
            ours = result.flatten(1)
            theirs = torch.cat([call[number].flatten(1) for call in calls])[: len(ours)]
            difference = (theirs.float() - ours.float()).abs()
            rows = difference.amax(1).nonzero()[:, 0].tolist()
            if rows:
                where = f"{name} → {kernel}[{number}]"
                yield Difference(where, len(rows), len(ours), rows[0], difference.max().item())


def _tensors(results: Sequence[Any]) -> list[Tensor]:
    return [result.detach().clone().cpu() for result in results if isinstance(result, Tensor)]
