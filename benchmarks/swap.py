"""Swap weights in mid-generation and check every token against a fresh engine that holds the new weights.

    python -m benchmarks.swap --device cpu --out swap.json
    python -m benchmarks.swap --engine server               # or group, ranks (data-parallel), or ray
    python -m benchmarks.swap --device cuda --transport nccl   # the learner's GPU is the second, if there is one
    python -m benchmarks.swap --model FOLDER               # before and after a few optimizer steps, not random weights

The scenario of vLLM's public asynchronous RL example: 13 greedy prompts are in flight; once a request beside them has
sampled its `--threshold` tokens the engine is paused (keep), other weights are transferred, it resumes, and each
request ends on the new weights. A fresh engine that loaded those weights from disk is then given each prompt with its
old tokens and has to sample the same continuation, token for token.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils.logging import disable_progress_bar

from rlenv.agents.hardware import hardware, versions
from rlenv.engine.base import Engine, UpdateReport
from rlenv.engine.group import EngineGroup
from rlenv.engine.platforms import batch_invariance_on
from rlenv.engine.server import ServerEngine
from rlenv.engine.serving import serve
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.vllm import VLLMEngine
from rlenv.models import default_model
from rlenv.render import Renderer
from rlenv.types import Completion, Sample

if TYPE_CHECKING:
    from rlenv.engine.ray import RayEngine

QUESTIONS = [f"What is {17 + 5 * i}+{83 - 4 * i}? Put the answer in \\boxed{{}}." for i in range(13)]
STEPS, LR = 3, 1e-4
SHAPES = {
    "tiny": {},  # the shipped model's
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Swap:
    """One request: what it sampled before and after, what old weights alone would say, what a fresh engine says."""

    prompt_ids: tuple[int, ...]
    old_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    unswapped_ids: tuple[int, ...]
    fresh_ids: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.new_ids == self.fresh_ids

    @property
    def equal_tokens(self) -> int:
        """How many tokens after the swap equal the fresh engine's, up to the first that does not."""
        pairs = enumerate(zip(self.new_ids, self.fresh_ids, strict=True))
        return next((i for i, (new, fresh) in pairs if new != fresh), len(self.new_ids))

    @property
    def differs(self) -> bool:
        """Whether old weights would have continued otherwise, so that the swap can be seen at all."""
        return self.new_ids != self.unswapped_ids[len(self.old_ids) :]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        swaps, report = asyncio.run(run(arguments, *make_models(folder, arguments)))
    result = summarise(arguments, swaps, report)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    for swap in swaps:
        verdict = "equal" if swap.exact else "DIFFERENT"
        tokens = f"… {list(swap.old_ids[-4:])} | {list(swap.new_ids[:4])} …"
        print(f"{len(swap.old_ids):4d} old + {len(swap.new_ids):4d} new tokens, {verdict}: {tokens}")
    passed = result["exact"] >= result["bar"] * result["total"] and result["differ"] > 0
    phases = ("pause_s", "transfer_s", "resume_s", "prove_s")
    times = " · ".join(f"{phase} {getattr(report, phase):.3f}" for phase in phases)
    print(
        f"{'PASS' if passed else 'FAIL'}: {result['exact']} of {result['total']} continuations equal a fresh engine's"
    )
    print(times)
    return 0 if passed else 1


async def run(arguments: argparse.Namespace, old: str, new: str) -> tuple[list[Swap], UpdateReport]:
    """Generate on `old`, swap to `new` in mid-generation, and generate the same continuations on a fresh engine."""
    greedy = Sample(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    with ENGINES[arguments.engine](arguments, old) as engine:
        prompts = _prompts(engine)
        unswapped = await _generate(engine, prompts, greedy)
        if arguments.transport == "nccl":
            _be_another_rank()
        parts: Any = engine.engines if isinstance(engine, EngineGroup) else (engine,)
        sender = ModelSender(_load(new, arguments), backend=parts[0].transport, dtype=parts[0].dtype)
        requests = [asyncio.create_task(engine.generate(p, greedy, request_id=f"r{i}")) for i, p in enumerate(prompts)]
        await engine.generate(prompts[0], replace(greedy, max_tokens=arguments.threshold))
        await engine.pause("keep")
        report = await engine.update_weights(sender, 1)  # resumes, too
        completions = await asyncio.gather(*requests)
    with VLLMEngine(new, **_settings(arguments)) as fresh:
        split = [_split(completion) for completion in completions]
        continued = [
            fresh.generate(prompt + list(before), Sample(temperature=0.0, max_tokens=len(after), ignore_eos=True))
            for prompt, (before, after) in zip(prompts, split, strict=True)
        ]
        continuations = await asyncio.gather(*continued)
    return [
        Swap(tuple(prompt), before, after, whole.token_ids, again.token_ids)
        for prompt, (before, after), whole, again in zip(prompts, split, unswapped, continuations, strict=True)
    ], report


@contextmanager
def in_process(arguments: argparse.Namespace, model: str) -> Iterator[VLLMEngine]:
    with VLLMEngine(model, **_settings(arguments)) as engine:
        yield engine


@contextmanager
def over_http(arguments: argparse.Namespace, model: str) -> Iterator[ServerEngine]:
    with serve(model, **_settings(arguments)) as server, ServerEngine(server.url) as engine:
        yield engine


@contextmanager
def in_a_group(arguments: argparse.Namespace, model: str) -> Iterator[EngineGroup]:
    cores = ("0", "1") if arguments.device == "cpu" else (None, None)
    with EngineGroup([VLLMEngine(model, cpu_cores=core, **_settings(arguments)) for core in cores]) as engine:
        yield engine


@contextmanager
def in_ranks(arguments: argparse.Namespace, model: str) -> Iterator[VLLMEngine]:
    where: dict[str, Any] = {"cpu_cores": "0|1"} if arguments.device == "cpu" else {"data_parallel_backend": "ray"}
    with VLLMEngine(model, data_parallel_size=2, **where, **_settings(arguments)) as engine:
        yield engine


@contextmanager
def in_an_actor(arguments: argparse.Namespace, model: str) -> Iterator[RayEngine]:
    import ray

    from rlenv.engine.ray import RayEngine

    ray.init(include_dashboard=False, log_to_driver=False)
    with RayEngine(model, actor={"num_gpus": int(arguments.device == "cuda")}, **_settings(arguments)) as engine:
        yield engine


ENGINES: dict[str, Callable[[argparse.Namespace, str], AbstractContextManager[Engine]]] = {
    "vllm": in_process,
    "server": over_http,
    "group": in_a_group,
    "ranks": in_ranks,
    "ray": in_an_actor,
}


def make_models(folder: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """Folders of the weights before and after: of a model and what a few steps make of it, or of two seeds."""
    if arguments.model is None:
        return make_model(f"{folder}/old", arguments, seed=1), make_model(f"{folder}/new", arguments, seed=2)
    return train_model(folder, arguments)


def train_model(folder: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """A pretrained model, and the same after `STEPS` steps of AdamW on the likelihood of the prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    prompts = [torch.tensor([_prompt(Renderer(tokenizer), question)]) for question in QUESTIONS]

    def save(name: str) -> str:
        copy.deepcopy(model).to(_dtype(arguments)).save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")
        return f"{folder}/{name}"

    old = save("old")
    for _ in range(STEPS):
        for prompt in prompts:
            (model(prompt, labels=prompt).loss / len(prompts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return old, save("new")


def make_model(folder: str, arguments: argparse.Namespace, seed: int) -> str:
    """Random weights of the chosen shape, with the shipped tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shipped = AutoConfig.from_pretrained(default_model())
    shape = SHAPES[arguments.shape] | {"max_position_embeddings": 1024, "layer_types": None}
    config = type(shipped)(**(shipped.to_dict() | shape))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=_dtype(arguments))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=arguments.std)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(default_model()).save_pretrained(folder)
    return folder


def summarise(arguments: argparse.Namespace, swaps: Sequence[Swap], report: UpdateReport) -> dict[str, Any]:
    random = arguments.model is None
    unread = () if random else ("shape", "std")
    trained = {} if random else {"model": Path(arguments.model).name, "steps": STEPS, "lr": LR}
    return {
        "exact": sum(swap.exact for swap in swaps),
        "total": len(swaps),
        "bar": 1.0 if arguments.device == "cpu" else batch_invariance_on(arguments.device).bar,
        "differ": sum(swap.differs for swap in swaps),
        "old_tokens": [len(swap.old_ids) for swap in swaps],
        "new_tokens": [len(swap.new_ids) for swap in swaps],
        "equal_tokens": [swap.equal_tokens for swap in swaps],
        "old_exact": sum(swap.old_ids == swap.unswapped_ids[: len(swap.old_ids)] for swap in swaps),
        "settings": {key: value for key, value in vars(arguments).items() if key not in ("out", "model", *unread)}
        | trained,
        "update": asdict(report),
        "hardware": hardware(arguments.device),
        "versions": versions(),
    }


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    gpu = {"batch_invariant": True, "transport": arguments.transport} if arguments.device == "cuda" else {}
    return {"device": arguments.device, **gpu}


async def _generate(engine: Engine, prompts: Sequence[Sequence[int]], sample: Sample) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(prompt, sample) for prompt in prompts)))


def _prompts(engine: Engine) -> list[list[int]]:
    renderer = Renderer(engine.tokenizer)
    return [_prompt(renderer, question) for question in QUESTIONS]


def _prompt(renderer: Renderer, question: str) -> list[int]:
    return renderer.start([{"role": "user", "content": question}])


def _split(completion: Completion) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Its tokens of version 0 and of version 1. Raises SystemExit if it ended before the swap."""
    if [span.version for span in completion.spans] != [0, 1]:
        raise SystemExit(f"{completion.request_id} ended before the engine was paused: give --tokens more")
    border = completion.spans[0].end
    return completion.token_ids[:border], completion.token_ids[border:]


def _be_another_rank() -> None:
    """Pin NCCL as a batch-invariant engine does, and after it has: it would take ours for what it was started with.

    With one GPU alone this process is another host to NCCL, which then takes the network's way from it to the engine.
    """
    import torch
    from vllm.model_executor.determinism.batch_invariant import override_envs_for_invariance

    override_envs_for_invariance()
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = "learner"


def _load(folder: str, arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(arguments))
    apart = arguments.transport == "nccl" and torch.cuda.device_count() > 1
    return model.to("cuda:1" if apart else arguments.device)


def _dtype(arguments: argparse.Namespace) -> Any:
    import torch

    return torch.float32 if arguments.device == "cpu" else torch.bfloat16


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.swap", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="vllm")
    parser.add_argument("--transport", choices=("ipc", "nccl", "shm"), default=None, help="on GPUs; default: ipc")
    parser.add_argument("--shape", choices=tuple(SHAPES), default=None, help="default: tiny on a CPU, 0.6b on a GPU")
    parser.add_argument("--model", help="folder of a model to train a little, in place of random weights of a shape")
    parser.add_argument("--tokens", type=int, default=None, help="tokens a request; default: 400 tiny, 200 0.6b")
    parser.add_argument("--threshold", type=int, default=40, help="swap once a request beside them has sampled so many")
    parser.add_argument("--std", type=float, default=None, help="of the random weights; default: 0.08 tiny, 0.03 0.6b")
    parser.add_argument("--out", help="where the JSON goes")
    arguments = parser.parse_args(argv)
    if arguments.transport and arguments.device == "cpu":
        parser.error(
            f"weights go to a CPU by shared memory: add --device cuda, or leave --transport {arguments.transport}"
        )
    if arguments.model and not Path(arguments.model, "config.json").is_file():
        parser.error(f"no model in {arguments.model}: name the folder that holds its config.json")
    arguments.shape = arguments.shape or ("tiny" if arguments.device == "cpu" else "0.6b")
    arguments.tokens = arguments.tokens or {"tiny": 400, "0.6b": 200}[arguments.shape]
    arguments.std = arguments.std or {"tiny": 0.08, "0.6b": 0.03}[arguments.shape]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
