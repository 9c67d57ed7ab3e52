"""Rollouts and a learner's log-probs of them enter; the verdict leaves: numerics, or the mistake that explains the gap.

What a log-prob is *of* can be read off its value. The learner scores the same ids as if each mistake were made; the
scoring that comes nearest to the engine's numbers says what the engine returns, and its own settings say what the
learner computes. Whichever of the two is not the distribution that was sampled from is to blame, even if both agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from rlenv.agents.learner_types import Scoring
from rlenv.agents.mismatch import Mismatch, measure
from rlenv.agents.packing import Batch, FloatArray
from rlenv.engine.base import HeadDtype

Score = Callable[[Batch, Scoring], Awaitable[FloatArray]]
RIGHT = Scoring()
CLEARLY = 0.8  # a scoring fits clearly better when it leaves less than this share of the gap
MISTAKES = {
    "raw log-probs": Scoring(temperature=False, support=False),
    "no temperature": Scoring(temperature=False),
    "no top-p, top-k": Scoring(support=False),
    "bf16 output head": Scoring(head="bfloat16"),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A mistake in words, the setting that mends it, and the gap that it alone makes."""

    name: str
    how: str
    mend: str
    gap: Mismatch

    def __str__(self) -> str:
        return f"{self.name}: {self.how} (mean |Δ| {self.gap.abs_mean:.2g} nats, k3 {self.gap.kl:.2g}); {self.mend}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Engine against learner as both are set up, and who is to blame. `costs` prices each mistake made alone."""

    mismatch: Mismatch
    passed: bool
    causes: tuple[Cause, ...]
    costs: dict[str, Mismatch]


async def diagnose(batch: Batch, score: Score, scoring: Scoring, dtype: str) -> Verdict:
    """Judge a batch that was sampled by the weights which `score` computes with; `scoring` is the learner's own."""
    engine = batch.behaviour[batch.live]
    scores = {candidate: await score(batch, candidate) for candidate in _candidates(batch)}
    own = scores[scoring] if scoring in scores else await score(batch, scoring)
    overall = measure(engine, own)
    within = overall.within(dtype)
    of_engine = list(_of_engine(engine, scores, within))
    causes = [*of_engine, *_of_learner(scoring, scores, within)]
    right = scores[RIGHT] if of_engine else engine
    costs = {name: measure(right, scores[wrong]) for name, wrong in MISTAKES.items() if wrong in scores}
    if not causes and not within:
        gap = "its log-probs are those of no distribution that we know"
        causes = [Cause("unexplained", gap, "see the inference path of `rlenv audit --full`", overall)]
    return Verdict(overall, not causes, tuple(causes), costs)


def _candidates(batch: Batch) -> list[Scoring]:
    """The scorings that differ on this batch, those with fewer mistakes first."""
    temperature, top_p, top_k = batch.sampling[batch.live].T
    warm, cut = bool((temperature != 1).any()), bool((top_p < 1).any() or (top_k > 0).any())
    heads: tuple[HeadDtype, ...] = ("float32", "bfloat16")
    switches = itertools.product([True, False][: 1 + warm], [True, False][: 1 + cut], heads)
    return sorted(itertools.starmap(Scoring, switches), key=_mistakes)


def _mistakes(scoring: Scoring) -> int:
    return (not scoring.temperature) + (not scoring.support) + (scoring.head != RIGHT.head)


def _of_engine(engine: FloatArray, scores: Mapping[Scoring, FloatArray], within: bool) -> Iterator[Cause]:
    """What the engine's numbers are of: the scoring that fits them clearly better than those with fewer mistakes."""
    gaps = {scoring: measure(engine, values).abs_mean for scoring, values in scores.items()}
    found = RIGHT
    for scoring in gaps:
        if gaps[scoring] < CLEARLY * gaps[found]:
            found = scoring
    gap = measure(engine, scores[RIGHT])
    cut = any(not scoring.support for scoring in scores)
    if not found.temperature and not (cut and found.support):
        before = "temperature, top-p and top-k" if cut else "temperature"
        yield Cause("raw log-probs", f"the engine's are those before {before}", _PROCESSED, gap)
    elif not found.temperature:
        yield Cause("temperature", "the engine's log-probs leave it out", _PROCESSED, gap)
    elif not found.support:
        yield Cause("top-p, top-k", "the engine's log-probs are over the whole vocabulary", _PROCESSED, gap)
    if found.head != RIGHT.head and not within:
        yield Cause("output head", "the engine's multiplies in bf16", "start vLLM with head_dtype float32", gap)


def _of_learner(scoring: Scoring, scores: Mapping[Scoring, FloatArray], within: bool) -> Iterator[Cause]:
    def gap(wrong: Scoring) -> Mismatch:
        return measure(scores[RIGHT], scores[wrong])

    if not scoring.temperature and (wrong := Scoring(temperature=False)) in scores:
        how = "the learner does not divide its logits by it"
        yield Cause("learner's temperature", how, "score at the sampling temperature", gap(wrong))
    if not scoring.support and (wrong := Scoring(support=False)) in scores:
        how = "the learner's log-softmax is over the whole vocabulary"
        yield Cause("learner's top-p, top-k", how, "score over the ids that were left to sample from", gap(wrong))
    if scoring.head != RIGHT.head and not within:
        how = f"the learner's multiplies in {scoring.head}"
        yield Cause("learner's output head", how, "score with an fp32 head", gap(Scoring(head=scoring.head)))


_PROCESSED = "start vLLM with logprobs_mode='processed_logprobs'"
