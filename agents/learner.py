"""Packed batches enter; optimizer steps, their metrics and a model on disk leave: one rank of an Accelerate run.

Every rank is given the whole batch and takes its shard of it, but divides by the live tokens of the whole. As
Accelerate averages gradients over ranks, each multiplies its loss by their number.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlenv.agents.corrections import BUCKETS, RatioTable, buckets
from rlenv.agents.exact import ExactPolicy
from rlenv.agents.learner_types import LearnerConfig, LossConfig, Scoring, StepMetrics
from rlenv.agents.losses import TokenLosses, multi_step_loss, one_step_loss
from rlenv.agents.packing import Batch, FloatArray, MicroBatch, micro_batches, rows_to_score
from rlenv.agents.policy import Policy
from rlenv.errors import LearnerError


class Learner:
    """A model under training: `version` counts the updates, `model` is the one whose weights are sent.

    Parameters are fp32; `mixed_precision="bf16"` runs the layers under autocast.
    """

    def __init__(self, config: LearnerConfig, model: PreTrainedModel | None = None) -> None:
        set_seed(config.seed)
        self.config = config
        self.version = 0
        self.model = model or AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
        self._accelerator = Accelerator(cpu=config.device == "cpu", mixed_precision=config.mixed_precision)
        policy = ExactPolicy(self.model) if config.engine_ops else Policy(self.model, config.scoring)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self._policy, self._optimizer = self._accelerator.prepare(policy, optimizer)
        self._optimizer_steps = 0

    def step(self, batch: Batch) -> StepMetrics:
        """Update the policy on a batch that was packed for this version.

        Raises LearnerError, with weights and optimizer as they were before the failing optimizer step, when a
        gradient is not finite.
        """
        began = time.perf_counter()
        if batch.version != self.version:
            raise LearnerError(f"the batch was packed for version {batch.version}, the learner is at {self.version}")
        parts = batch.minibatches(self.config.minibatches, seed=self.config.seed + self.version)
        split = [list(self._micro_batches(part)) for part in parts]
        several = len(parts) > 1
        old = [[self._old_logprobs(micro) if several else None for micro in micros] for micros in split]
        table = RatioTable(self._accelerator.device)
        losses, norms = [], []
        for part, micros, old_of_micros in zip(parts, split, old, strict=True):
            losses.append(self._accumulate(micros, old_of_micros, part.live_tokens, table))
            norms.append(self._optimizer_step())
        self.version += 1
        return self._metrics(batch, table, losses, norms, began)

    @torch.no_grad()
    def score(self, batch: Batch, scoring: Scoring | None = None) -> FloatArray:
        """Log-probs [L] of the batch's live ids in their order, computed as `step` does; or by another `scoring`."""
        policy = self._accelerator.unwrap_model(self._policy)
        usual = policy.scoring
        policy.scoring = scoring or usual
        try:
            live = [np.flatnonzero(batch.live[start:end]) for start, end in pairwise(batch.offsets)]
            scores: list[FloatArray] = [np.zeros(0, np.float32)] * batch.rows
            for micro in micro_batches(batch, self.config.micro_batch_tokens):
                values, _ = self._policy(*self._inputs(micro))
                sizes = [len(live[row]) for row in micro.rows]
                for row, part in zip(micro.rows, values.split(sizes), strict=True):
                    scores[row] = part.cpu().numpy()
            return np.concatenate(scores)
        finally:
            policy.scoring = usual

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs [n - 1] of ids 1..n-1 of each sequence, at temperature 1; fp32 or `engine_ops`, no autocast."""
        long_enough = [number for number, ids in enumerate(sequences) if len(ids) > 1]
        result: list[list[float]] = [[] for _ in sequences]
        if not long_enough:
            return result
        batch = rows_to_score([sequences[number] for number in long_enough])
        for micro in micro_batches(batch, self.config.micro_batch_tokens):
            scores, _ = Policy.forward(self._accelerator.unwrap_model(self._policy), *self._inputs(micro))
            lengths = (batch.lengths[micro.rows] - 1).tolist()
            for row, values in zip(micro.rows, scores.split(lengths), strict=True):
                result[long_enough[row]] = values.tolist()
        return result

    def save(self, folder: Path) -> None:
        """Write model and tokenizer for transformers. The folder appears whole, and replaces one that was there."""
        partial, former = (folder.with_name(f".{folder.name}.{word}") for word in ("partial", "former"))
        for leftover in (partial, former):
            shutil.rmtree(leftover, ignore_errors=True)
        self.model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(self.config.model).save_pretrained(partial)
        if folder.exists():
            os.replace(folder, former)
        os.replace(partial, folder)
        shutil.rmtree(former, ignore_errors=True)

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        shard = batch.shard(self._accelerator.process_index, self._accelerator.num_processes)
        return micro_batches(shard, self.config.micro_batch_tokens)

    def _accumulate(
        self, micros: Sequence[MicroBatch], old: Sequence[Tensor | None], live_tokens: int, table: RatioTable
    ) -> float:
        """Add up the gradient of the loss, a mean over `live_tokens`; returns this rank's part of the loss."""
        total = 0.0
        for number, (micro, old_logprobs) in enumerate(zip(micros, old, strict=True), start=1):
            last = number == len(micros)
            with nullcontext() if last else self._accelerator.no_sync(self._policy):
                current, entropies = self._policy(*self._inputs(micro))
                losses = self._loss(micro, current, old_logprobs)
                loss = losses.total / live_tokens
                self._accelerator.backward(loss * self._accelerator.num_processes)
            self._count(micro, losses, current.detach() if old_logprobs is None else old_logprobs, entropies, table)
            total += loss.item()
        return total

    def _loss(self, micro: MicroBatch, current: Tensor, old: Tensor | None) -> TokenLosses:
        behaviour, advantages = self._to(micro.behaviour), self._to(micro.advantages)
        stale = self._to((micro.staleness > 0) | micro.stale_context)
        config: LossConfig = self.config.loss
        if old is None:
            return one_step_loss(current, behaviour, advantages, stale, config)
        return multi_step_loss(current, old, behaviour, advantages, stale, config)

    def _count(self, micro: MicroBatch, losses: TokenLosses, old: Tensor, entropies: Tensor, table: RatioTable) -> None:
        bucket = buckets(self._to(micro.staleness), self._to(micro.stale_context))
        table.add(bucket, old - self._to(micro.behaviour), losses.clipped, entropies)

    def _optimizer_step(self) -> float:
        """Clip the summed gradient once and step; returns its norm before clipping."""
        parameters = [parameter for parameter in self._policy.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if not math.isfinite(norm.item()):
            where = self._first_bad_gradient()
            self._optimizer.zero_grad()
            raise LearnerError(f"update to version {self.version + 1}: {where}; the optimizer step was not made")
        nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._optimizer_steps += 1
        return norm.item()

    def _lr(self) -> float:
        return self.config.lr * min(1.0, (self._optimizer_steps + 1) / max(1, self.config.warmup_steps))

    def _first_bad_gradient(self) -> str:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return f"the gradient of {name} is not finite"
        return "the norm of the gradient overflows fp32"

    def _metrics(
        self, batch: Batch, table: RatioTable, losses: list[float], norms: list[float], began: float
    ) -> StepMetrics:
        reduce: Callable[[Tensor], Tensor] = self._accelerator.reduce
        table.sums = reduce(table.sums)
        table.peaks = self._accelerator.gather(table.peaks[None]).amax(0)
        loss = reduce(torch.tensor(losses, device=self._accelerator.device)).mean().item()
        overall, stale = table.of(*BUCKETS), table.of(*BUCKETS[1:])
        assert overall is not None, "a batch has live tokens"
        return StepMetrics(
            version=self.version,
            loss=loss,
            grad_norm=float(np.mean(norms)),
            lr=self._optimizer.param_groups[0]["lr"],
            rows=batch.rows,
            tokens=overall.tokens,
            entropy=table.entropy(),
            clip_fraction=overall.clip_fraction,
            frac_zero_std=batch.zero_std_fraction,
            fresh=table.of(BUCKETS[0]),
            stale=stale,
            by_staleness=table.by_staleness(),
            seconds=time.perf_counter() - began,
        )

    @torch.no_grad()
    def _old_logprobs(self, micro: MicroBatch) -> Tensor:
        return self._policy(*self._inputs(micro))[0]

    def _inputs(self, micro: MicroBatch) -> Iterable[Tensor]:
        return map(self._to, (micro.token_ids, micro.attention_mask, micro.live, micro.sampling))

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._accelerator.device)
