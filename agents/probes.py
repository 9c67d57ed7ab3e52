"""An engine and a learner of the same weights enter; their mismatch on one path through the engine leaves.

Every probe samples at temperature 1 over the whole vocabulary, where log-probs mean one thing, so that what it sees
is the path alone: what else is in the batch, what the caches hold, what a weight swap left behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlenv.agents.learner import Learner
from rlenv.agents.mismatch import Mismatch, measure
from rlenv.agents.packing import rows_to_score
from rlenv.engine.base import PauseMode
from rlenv.engine.transfer.sender import ModelSender
from rlenv.engine.vllm import VLLMEngine
from rlenv.types import Completion, Sample

TOGETHER, ALONE = 16, 4  # requests
LENGTH = 24  # ids sampled for each
IN_FLIGHT_LENGTH = {"cpu": 96, "cuda": 1500}  # long enough to be in flight while a swap is staged
SWAP_AFTER = 24  # ids, of requests in flight
# Of each tensor's spread: enough for old keys and values to be told from new ones above the noise of the dtype. More
# would not do: a pretrained model can then amplify the rounding of fp32 to 0.04 nats.
NOISE = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.05}
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Swap:
    """What a weight update left behind: requests begun after it, on prompts cached before it, or in flight at it."""

    fresh: Mismatch
    cached: Mismatch
    in_flight: Mismatch | None  # None: the pause kept none


class Probes:
    """Paths through one engine, each against `learner`, which shares its weights from `start` on."""

    def __init__(self, engine: VLLMEngine, learner: Learner, seed: int = 0) -> None:
        self.engine, self.learner = engine, learner
        self._random = random.Random(seed)
        self._length = min(engine.block_size + 16, engine.max_model_len - 2 * LENGTH)  # a block and a part
        self._long = min(IN_FLIGHT_LENGTH[engine.device], engine.max_model_len - self._length - 1)
        self._sender = ModelSender(learner.model, backend=engine.transport, dtype=engine.dtype)

    def prompts(self, count: int) -> Prompts:
        """Prompts that no cache has seen, longer than a block of it."""
        vocabulary = len(self.engine.tokenizer)
        return [[self._random.randrange(vocabulary) for _ in range(self._length)] for _ in range(count)]

    async def together(self, prompts: Prompts) -> Mismatch:
        """All at once, in one batch."""
        return self._compare(await asyncio.gather(*(self._sampled(prompt) for prompt in prompts)))

    async def alone(self, prompts: Prompts) -> Mismatch:
        """One after the other."""
        return self._compare([await self._sampled(prompt) for prompt in prompts])

    async def swap(self, cached: Prompts, mode: PauseMode, clear_cache: bool) -> Swap:
        """Move every weight on both sides while requests run, then look at what old weights computed."""
        self._perturb()
        if mode != "keep":
            await self.update(mode, clear_cache)
            in_flight = None
        else:
            running = [asyncio.ensure_future(self._sampled(prompt, self._long)) for prompt in self.prompts(TOGETHER)]
            while max(self.engine.progress().values(), default=0) < SWAP_AFTER:  # noqa: ASYNC110 - vLLM tells no one
                await asyncio.sleep(0.002)
            label = await self.update(mode, clear_cache)
            in_flight = self._compare(await asyncio.gather(*running), label)
        return Swap(await self.together(self.prompts(TOGETHER)), await self.together(cached), in_flight)

    async def update(self, mode: PauseMode, clear_cache: bool) -> str:
        """Send the learner's weights; returns the label that they serve under."""
        version = self.engine.weight_version + 1
        report = await self.engine.update_weights(self._sender, version, mode=mode, clear_cache=clear_cache)
        return report.label

    @torch.no_grad()
    def _perturb(self) -> None:
        generator = torch.Generator().manual_seed(self._random.randrange(2**31))
        for parameter in self.learner.model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * NOISE[self.engine.dtype] * torch.nan_to_num(spread))

    async def _sampled(self, prompt: Sequence[int], length: int = LENGTH) -> Completion:
        return await self.engine.generate(prompt, Sample(max_tokens=length, ignore_eos=True))

    def _compare(self, completions: Sequence[Completion], label: str | None = None) -> Mismatch:
        """Over the sampled ids, or over those alone that the weights of `label` sampled."""
        batch = rows_to_score([completion.prompt_ids + completion.token_ids for completion in completions])
        live, behaviour = np.zeros_like(batch.live), batch.behaviour.copy()
        for completion, offset in zip(completions, batch.offsets, strict=False):
            start = int(offset) + len(completion.prompt_ids)
            behaviour[start : start + len(completion.token_ids)] = completion.logprobs
            for span in completion.spans:
                live[start + span.start : start + span.end] = label is None or span.label == label
        batch = replace(batch, live=live, behaviour=behaviour, live_tokens=int(live.sum()))
        return measure(behaviour[live], self.learner.score(batch))
