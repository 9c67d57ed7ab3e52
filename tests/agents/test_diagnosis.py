"""Each mistake about log-probs is told by name, on either side; numerics are never blamed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from rows import group, tiny_model, trajectory

from rlenv.agents.advantages import score
from rlenv.agents.diagnosis import RIGHT, Verdict, diagnose
from rlenv.agents.learner import Learner
from rlenv.agents.learner_types import LearnerConfig, Scoring
from rlenv.agents.mismatch import measure
from rlenv.agents.packing import Batch, FloatArray, pack
from rlenv.types import Sample

NOISE = 2e-6
PLAIN, WARM = Sample(), Sample(temperature=0.6)
NUCLEUS, TOP = Sample(top_p=0.8), Sample(top_k=5)
ALL = Sample(temperature=0.6, top_p=0.8, top_k=9)


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(LearnerConfig(model="random"), model=tiny_model(vocab_size=64))


def verdict(
    learner: Learner, sample: Sample, *, engine: Scoring = RIGHT, own: Scoring = RIGHT, seed: int = 0
) -> Verdict:
    """As if an engine had returned log-probs of `engine`'s kind, and the learner computed those of `own`."""
    rng = np.random.default_rng(seed)
    rows = [trajectory(rng.integers(0, 64, 3), rng.integers(0, 64, 25).tolist(), sample=sample) for _ in range(20)]
    batch = pack(score([group(*rows)]), version=0)
    behaviour = batch.behaviour.copy()
    behaviour[batch.live] = learner.score(batch, engine) + rng.normal(0, NOISE, 500).astype(np.float32)

    async def values(batch: Batch, scoring: Scoring) -> FloatArray:
        return learner.score(batch, scoring)

    return asyncio.run(diagnose(replace(batch, behaviour=behaviour), values, own, "float32"))


@pytest.mark.parametrize("sample", [PLAIN, WARM, NUCLEUS, TOP, ALL], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_right_backend_is_not_blamed(learner: Learner, sample: Sample, seed: int) -> None:
    result = verdict(learner, sample, seed=seed)
    assert result.passed and result.causes == ()
    assert result.mismatch.abs_max <= 1e-4 and result.mismatch.ratio_mean == pytest.approx(1, abs=1e-4)


RAW = Scoring(temperature=False, support=False)


@pytest.mark.parametrize(
    ("sample", "engine", "own", "name"),
    [
        (WARM, RAW, Scoring(), "raw log-probs"),
        (ALL, RAW, Scoring(), "raw log-probs"),
        (NUCLEUS, RAW, Scoring(), "top-p, top-k"),
        (TOP, RAW, Scoring(), "top-p, top-k"),
        (WARM, Scoring(), Scoring(temperature=False), "learner's temperature"),
        (NUCLEUS, Scoring(), Scoring(support=False), "learner's top-p, top-k"),
        (TOP, Scoring(), Scoring(support=False), "learner's top-p, top-k"),
        (PLAIN, Scoring(head="bfloat16"), Scoring(), "output head"),
        (WARM, Scoring(head="bfloat16"), Scoring(), "output head"),
        (PLAIN, Scoring(), Scoring(head="bfloat16"), "learner's output head"),
    ],
)
def test_a_mistake_is_named_with_its_figure(
    learner: Learner, sample: Sample, engine: Scoring, own: Scoring, name: str
) -> None:
    result = verdict(learner, sample, engine=engine, own=own)
    assert [cause.name for cause in result.causes] == [name]
    assert not result.passed
    assert (
        result.causes[0].gap.abs_mean == pytest.approx(result.mismatch.abs_mean, rel=0.01)
        and result.mismatch.abs_max > 1e-3
    )


def test_two_mistakes_that_hide_one_another_are_both_named(learner: Learner) -> None:
    result = verdict(learner, WARM, engine=RAW, own=Scoring(temperature=False))
    assert result.mismatch.abs_max <= 1e-4
    assert [cause.name for cause in result.causes] == ["raw log-probs", "learner's temperature"]
    assert not result.passed


def test_a_gap_that_no_mistake_explains_is_called_so(learner: Learner) -> None:
    other = Learner(LearnerConfig(model="random"), model=tiny_model(vocab_size=64, seed=1))
    batch = pack(score([group(trajectory((1, 2), range(3, 40)), trajectory())]), version=0)
    behaviour = batch.behaviour.copy()
    behaviour[batch.live] = other.score(batch)

    async def values(batch: Batch, scoring: Scoring) -> FloatArray:
        return learner.score(batch, scoring)

    result = asyncio.run(diagnose(replace(batch, behaviour=behaviour), values, Scoring(), "float32"))
    assert [cause.name for cause in result.causes] == ["unexplained"]


def test_costs_price_each_mistake_that_matters_at_this_sampling(learner: Learner) -> None:
    assert verdict(learner, PLAIN).costs.keys() == {"bf16 output head"}
    costs = verdict(learner, ALL).costs
    assert costs.keys() == {"raw log-probs", "no temperature", "no top-p, top-k", "bf16 output head"}
    assert min(cost.kl for cost in costs.values()) > 1e-7
    assert costs["no temperature"].abs_mean > 100 * costs["bf16 output head"].abs_mean


def test_the_figures_of_a_mismatch() -> None:
    engine, learner = np.log(np.float32([0.5, 0.25])), np.log(np.float32([0.4, 0.5]))
    result = measure(engine, learner)
    assert result.tokens == 2
    assert result.ratio_mean == pytest.approx((0.8 + 2) / 2)
    assert result.offset == pytest.approx((np.log(0.5 / 0.4) + np.log(0.25 / 0.5)) / 2)
    assert result.abs_max == pytest.approx(np.log(2))
    assert result.kl == pytest.approx(((0.8 - 1 - np.log(0.8)) + (2 - 1 - np.log(2))) / 2)
    assert result.clip_fraction == 0.5, "0.8 is on the edge, 2 is outside"
    assert result.ess == pytest.approx(2.8**2 / (2 * (0.64 + 4)))
    assert result.entropy == pytest.approx(np.log(8) / 2)
    assert measure(engine, np.float32([-np.inf, np.nan])).abs_max == 20
