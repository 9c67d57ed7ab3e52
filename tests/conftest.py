"""Tokenizers and engines that tests share: small, made in memory, no model and no network."""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.faults import FaultyEngine
from rlenv.engine.base import Engine, Manifest, TensorDigest, WeightSender, WeightSyncClient
from rlenv.engine.group import EngineGroup
from rlenv.engine.scripted import Policy, ScriptedEngine
from rlenv.engine.server import ServerEngine
from rlenv.engine.serving import Server, serve
from rlenv.engine.transfer.plugin import SHARED_MEMORY
from rlenv.engine.transfer.sender import ModelSender
from rlenv.models import default_model
from rlenv.render import Renderer
from rlenv.types import Sample

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Of Qwen3's type: a user's turn hides the thinking before it, a last answer always shows some, tools speak as users.
THINKING = """
{%- set seen = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought, answer = '', m.content -%}
{%- if '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > seen.user and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
IMPORTS_VLLM = re.compile(r"^(from|import) vllm", re.MULTILINE)
CORPUS = ["user assistant system abc abc abcabc the answer is 42\n", "Question: what is 12 + 30?\n\nAnswer: 42 ok ok"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier does without vLLM, whose import takes longer than a hundred tests."""
    if "not slow" in config.option.markexpr and collection_path.suffix == ".py":
        return True if IMPORTS_VLLM.search(collection_path.read_text()) else None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs come first: later on, engines that tests share would run beside them."""
    items.sort(key=lambda item: "test_end_to_end" not in item.nodeid)


@pytest.fixture(scope="session")
def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, ChatML, turns that end in <|im_end|> and a newline."""
    vocabulary = {char: id for id, char in enumerate(string.printable + "²мπ≈✅🙂")}
    backend = Tokenizer(models.WordLevel({**vocabulary, "<unk>": len(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def thinking_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges and a template of Qwen3's type, which strips the thinking of earlier turns."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    plain = ("<think>", "</think>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer.chat_template = THINKING
    return tokenizer


@pytest.fixture(params=["char_tokenizer", "thinking_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Each of the two tokenizers in turn."""
    tokenizer: PreTrainedTokenizerFast = request.getfixturevalue(request.param)
    return tokenizer


@pytest.fixture
def scripted(char_tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., ScriptedEngine]]:
    """`scripted(policy, **options)` starts a ScriptedEngine, on the character tokenizer unless told, and closes it."""
    engines: list[ScriptedEngine] = []

    def start(policy: Policy, *, tokenizer: Any = char_tokenizer, **options: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(tokenizer, policy, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@dataclass(frozen=True)
class EngineCase:
    """An engine under the contract suite, a prompt that it may be given, and a sender of its own weights."""

    engine: Engine
    prompt_ids: list[int]
    sender: WeightSender


class ScriptedSender:
    """A sender for the scripted engine: asks for one update of one tensor."""

    def send(self, client: WeightSyncClient) -> Manifest:
        client.start_weight_update()
        client.update_weights({"names": ["weight"]})
        client.finish_weight_update()
        return {"weight": TensorDigest("float32", (2, 2), "0")}

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]


@pytest.fixture
def sender() -> WeightSender:
    """A sender for the scripted engine."""
    return ScriptedSender()


@pytest.fixture
def scripted_case(scripted: Callable[..., ScriptedEngine], sender: WeightSender) -> EngineCase:
    """The scripted engine, saying the alphabet over and over, two milliseconds a letter."""
    alphabet = list(range(10, 36))
    engine = scripted(lambda prompt_ids, sample: alphabet * 20, delay=0.002, max_model_len=256)
    prompt = Renderer(engine.tokenizer).start([{"role": "user", "content": "abc"}])
    return EngineCase(engine, prompt, sender)


@pytest.fixture
def group_case(scripted: Callable[..., ScriptedEngine], sender: WeightSender) -> Iterator[EngineCase]:
    """Two scripted engines behind one contract."""
    alphabet = list(range(10, 36))
    engines = [
        scripted(lambda prompt_ids, sample: alphabet * 20, delay=0.004, max_model_len=limit) for limit in (256, 512)
    ]
    prompt = Renderer(engines[0].tokenizer).start([{"role": "user", "content": "abc"}])
    with EngineGroup(engines) as group:
        yield EngineCase(group, prompt, sender)


@pytest.fixture(scope="session")
def vllm_engine() -> Iterator[FaultyEngine]:
    """The real engine on the shipped model, started once; its worker can be made to fail on purpose."""
    with FaultyEngine(default_model(), device="cpu", max_model_len=256) as engine:
        yield engine


@pytest.fixture
def vllm_case(vllm_engine: FaultyEngine) -> EngineCase:
    """The real engine under the contract."""
    return _shipped_model_on(vllm_engine)


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[Server]:
    """A real server of the shipped model, started once; its worker can be made to fail on purpose.

    Each step takes 3 ms longer than it must: on a busy machine a call over HTTP may take as long as 100 quick ones.
    """
    extension = FaultyEngine.worker_extension
    with serve(default_model(), device="cpu", max_model_len=256, token="secret", worker_extension=extension) as server:
        call_worker(server.url, "rlenv_slow", "0.003")
        yield server


class FaultyServerEngine(ServerEngine):
    """The client, whose server's worker can be broken."""

    broken: str | None = None

    async def break_worker(self, how: str = "", tensor: str = "") -> None:
        await asyncio.to_thread(call_worker, self.url, "rlenv_break", how, tensor)


def call_worker(url: str, method: str, *arguments: str) -> None:
    """Call a method of a server's worker."""
    body = {"method": method, "args": arguments}
    httpx.post(f"{url}/collective_rpc", json=body, timeout=30).raise_for_status()


@pytest.fixture(scope="session")
def server_engine(vllm_server: Server) -> Iterator[FaultyServerEngine]:
    """The one client of that server."""
    with FaultyServerEngine(vllm_server.url, token=vllm_server.token) as engine:
        yield engine


@pytest.fixture
def server_case(server_engine: FaultyServerEngine) -> EngineCase:
    """The engine behind HTTP under the contract."""
    return _shipped_model_on(server_engine)


@pytest.fixture(scope="session")
def vllm_group() -> Iterator[EngineGroup]:
    """Two real engines, a core each, started once. An update takes one after the other: none may end before it."""
    engines = [FaultyEngine(default_model(), device="cpu", max_model_len=256, cpu_cores=core) for core in "01"]
    for engine in engines:
        asyncio.run(engine.slow_worker(0.004))
    with EngineGroup(engines) as group:
        case = _shipped_model_on(group)
        first = [group.submit(case.prompt_ids, Sample(max_tokens=50)) for _ in range(8)]
        group.update_weights_sync(case.sender, 1)  # the first of everything takes seconds, and an update rolls
        for future in first:
            future.result(60)
        yield group


@pytest.fixture
def vllm_group_case(vllm_group: EngineGroup) -> EngineCase:
    """Two real engines behind one contract."""
    return _shipped_model_on(vllm_group)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this machine, started once."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def ray_engine(local_ray: None) -> Iterator[Engine]:
    """The real engine in an actor, started once."""
    from rlenv.engine.ray import RayEngine

    with RayEngine(default_model(), device="cpu", max_model_len=256, cpu_cores="1") as engine:
        yield engine


@pytest.fixture
def ray_case(ray_engine: Engine) -> EngineCase:
    """The engine in an actor under the contract."""
    return _shipped_model_on(ray_engine)  # calls of an actor take a while


def _shipped_model_on(engine: Engine) -> EngineCase:
    """A sender that sends the shipped weights again."""
    prompt = Renderer(engine.tokenizer).start([{"role": "user", "content": "What is 12+34?"}])
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    return EngineCase(engine, prompt, ModelSender(model, backend=SHARED_MEMORY))
