import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from rows import group, rewarded, tiny_model, trajectory
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlenv.agents.advantages import score
from rlenv.agents.learner import Learner
from rlenv.agents.learner_types import LearnerConfig, Scoring
from rlenv.agents.packing import Batch, pack
from rlenv.errors import LearnerError
from rlenv.models import default_model
from rlenv.types import Group, Sample, Trajectory

Gradients = dict[str, torch.Tensor]


def learner(**settings: Any) -> Learner:
    return Learner(LearnerConfig(**({"model": "random", "lr": 1e-3} | settings)), model=tiny_model())


def packed(*groups: Group, version: int = 0) -> Batch:
    return pack(score(groups), version=version)


def rows_of_lengths(*lengths: int, **settings: Any) -> Batch:
    rng = np.random.default_rng(0)
    rows = [
        trajectory(rng.integers(1, 24, 3).tolist(), rng.integers(1, 24, n).tolist(), reward=i % 3)
        for i, n in enumerate(lengths)
    ]
    return packed(group(*rows), **settings)


@pytest.fixture(autouse=True)
def _own_accelerator_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def stepped() -> Iterator[list[torch.optim.Optimizer]]:
    """Each optimizer step's gradients, by their place in the optimizer, as the optimizer gets them."""
    seen: list[Any] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    handle = register_optimizer_step_pre_hook(keep)
    yield seen
    handle.remove()


def flat(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("max_tokens", [1, 22, 30])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(stepped: list[Any], max_tokens: int) -> None:
    batch = rows_of_lengths(2, 10, 3, 9)
    for budget in (1000, max_tokens):
        learner(max_grad_norm=1e9, micro_batch_tokens=budget).step(batch)
    whole, split = map(flat, stepped)
    assert whole.norm() > 1e-3
    assert relative_error(split, whole) <= 1e-5


def test_the_gradients_of_ranks_add_up_to_that_of_the_batch(stepped: list[Any]) -> None:
    batch = rows_of_lengths(2, 10, 3, 9)
    for part in (batch, batch.shard(0, 2), batch.shard(1, 2)):
        learner(max_grad_norm=1e9).step(part)
    whole, first, second = map(flat, stepped)
    assert relative_error(first + second, whole) <= 1e-5


def test_the_gradient_is_that_of_a_token_mean_written_out(stepped: list[Any]) -> None:
    batch = rows_of_lengths(2, 10, 3, 9)
    learner(max_grad_norm=1e9).step(batch)
    model = tiny_model()
    loss = torch.zeros(())
    for row in range(batch.rows):
        ids = torch.from_numpy(batch.token_ids[batch.offsets[row] : batch.offsets[row + 1]])
        distribution = model(ids[None]).logits[0].log_softmax(-1)
        sampled = distribution[range(2, len(ids) - 1), ids[3:]]
        loss = loss - batch.advantages[row].item() * sampled.sum() / 24
    loss.backward()
    assert relative_error(flat(stepped[0]), flat([p.grad for p in model.parameters()])) <= 1e-5


def test_clipping_and_the_optimizer_act_once_on_the_sum_of_many_micro_batches(stepped: list[Any]) -> None:
    batch = rows_of_lengths(*range(2, 12))
    trained = learner(micro_batch_tokens=1, warmup_steps=4)
    lrs = []
    for version in range(3):
        metrics = trained.step(replace(batch, version=version, advantages=batch.advantages * 1e6))
        assert metrics.grad_norm > 1e3
        assert flat(stepped[-1]).norm() == pytest.approx(1.0, abs=1e-4)
        lrs.append(metrics.lr)
    assert len(stepped) == 3
    assert lrs == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])


def test_equal_rewards_give_a_gradient_of_exactly_zero(stepped: list[Any]) -> None:
    metrics = learner().step(packed(rewarded(1, 1, 1, 1), rewarded(0, 0, 0, 0), rewarded(1, 1 + 1e-9)))
    assert metrics.frac_zero_std == 1.0
    assert not flat(stepped[0]).any()


def test_what_masked_tokens_carry_changes_nothing(stepped: list[Any]) -> None:
    batch = rows_of_lengths(2, 10)
    wild = np.where(batch.live, batch.behaviour, -200.0).astype(np.float32)
    stale = np.where(batch.live, 0, 3)
    metrics = [learner().step(other) for other in (batch, replace(batch, behaviour=wild, staleness=stale))]
    assert torch.equal(flat(stepped[0]), flat(stepped[1]))
    assert metrics[0].fresh == metrics[1].fresh and metrics[1].stale is None


@pytest.mark.parametrize("minibatches", [1, 2])
def test_extreme_log_ratios_at_live_tokens_leave_the_update_finite(stepped: list[Any], minibatches: int) -> None:
    batch = rows_of_lengths(2, 10)
    behaviour = np.where(np.arange(len(batch.behaviour)) % 2, 60.0, -80.0).astype(np.float32)
    trained = learner(minibatches=minibatches)
    metrics = trained.step(replace(batch, version=0, behaviour=behaviour, staleness=batch.staleness + 1))
    assert metrics.stale and metrics.stale.abs_max > 50
    assert math.isfinite(metrics.loss) and math.isfinite(metrics.stale.kl)
    assert all(torch.isfinite(parameter).all() for parameter in trained.model.parameters())


def test_an_end_token_with_the_number_of_padding_is_learned(stepped: list[Any]) -> None:
    rows = (trajectory((1, 0, 2), (0,), reward=1), trajectory((1, 2), (0,)), trajectory((3,), (4,) * 9))
    metrics = learner().step(packed(group(*rows)))
    assert metrics.tokens == 1 + 1 + 9
    assert flat(stepped[0]).any()
    better = learner(lr=1e-4)
    before = better.logprobs([[1, 0, 2, 0]])[0][-1]
    better.step(packed(group(rows[0], rows[2])))
    assert better.logprobs([[1, 0, 2, 0]])[0][-1] > before


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_gradient_that_is_not_finite_stops_before_the_optimizer(minibatches: int) -> None:
    trained, batch = learner(minibatches=minibatches), rows_of_lengths(2, 10, 3, 9)
    poisoned = dict(trained.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    for version in range(2):
        trained.step(replace(batch, version=version))
    hook = poisoned.register_hook(lambda gradient: gradient * math.nan)
    before = [parameter.detach().clone() for parameter in trained.model.parameters()]
    with pytest.raises(LearnerError, match=r"version 3: the gradient of model\.layers\.1\.mlp\.up_proj\.weight"):
        trained.step(replace(batch, version=2))
    assert trained.version == 2
    assert all(map(torch.equal, trained.model.parameters(), before))
    hook.remove()
    assert math.isfinite(trained.step(replace(batch, version=2)).grad_norm)


def own_logprobs(trained: Learner, temperature: float, *rows: Trajectory) -> list[Trajectory]:
    result = []
    for row in rows:
        logits = trained.model(torch.tensor([row.token_ids])).logits[0] / temperature
        values = logits.log_softmax(-1)[range(len(row.token_ids) - 1), row.token_ids[1:]].tolist()
        result.append(replace(row, logprobs=(0.0, *values)))
    return result


@pytest.mark.parametrize("minibatches", [1, 2])
def test_fresh_tokens_of_the_same_distribution_show_numerics_only(minibatches: int) -> None:
    trained = learner(minibatches=minibatches, lr=0.1)
    sample = Sample(temperature=0.6)
    rows = own_logprobs(
        trained, 0.6, trajectory(reward=1, sample=sample), trajectory((1, 2, 3), (4, 5, 9), sample=sample)
    )
    metrics = trained.step(packed(group(*rows)))
    assert metrics.fresh.abs_max < 1e-5
    assert metrics.fresh.ratio_mean == pytest.approx(1.0, abs=1e-5)
    naive = learner(scoring=Scoring(temperature=False))
    assert naive.step(packed(group(*rows))).fresh.abs_max > 0.05


def test_metrics_keep_fresh_and_stale_tokens_apart() -> None:
    trained = learner()
    trained.version = 5
    fresh, stale = own_logprobs(trained, 1.0, trajectory(reward=1, version=5), trajectory((1, 2), (3, 4, 5), version=3))
    stale = replace(stale, logprobs=tuple(value - 0.5 for value in stale.logprobs))
    metrics = trained.step(packed(group(fresh, stale), version=5))
    assert metrics.version == 6
    assert (metrics.fresh.tokens, metrics.stale.tokens, metrics.tokens, metrics.rows) == (2, 3, 5, 2)
    assert metrics.fresh.abs_max < 1e-5
    assert metrics.stale.ratio_mean == pytest.approx(math.exp(0.5), rel=1e-4)
    assert metrics.by_staleness == {"0": metrics.fresh, "2": metrics.stale}
    assert metrics.entropy > 0


def test_several_steps_an_update_clip_against_the_policy_of_its_start(stepped: list[Any]) -> None:
    batch = rows_of_lengths(*[4] * 32)
    calm = learner(minibatches=4, lr=1e-6).step(batch)
    moved = learner(minibatches=4, lr=3e-2).step(batch)
    assert len(stepped) == 8
    assert calm.clip_fraction == 0.0 and moved.clip_fraction > 0.1
    assert calm.fresh.abs_mean == pytest.approx(moved.fresh.abs_mean)


def test_the_same_seed_and_batches_give_the_same_weights_bit_for_bit() -> None:
    runs = []
    for _ in range(2):
        trained = learner(minibatches=2)
        for version in range(3):
            trained.step(rows_of_lengths(2, 10, 3, 9, version=version))
        runs.append(list(trained.model.parameters()))
    assert all(map(torch.equal, *runs))


def test_a_batch_for_another_version_is_refused() -> None:
    with pytest.raises(LearnerError, match="packed for version 3, the learner is at 0"):
        learner().step(rows_of_lengths(2, 3, version=3))


def test_logprobs_are_those_of_the_model_in_fp32_and_in_the_order_asked_for() -> None:
    scored = learner(mixed_precision="bf16", micro_batch_tokens=8)
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [], [1, 0]]
    result = scored.logprobs(sequences)
    assert [len(values) for values in result] == [2, 0, 4, 0, 1]
    for ids, values in zip(sequences, result, strict=True):
        if values:
            distribution = scored.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            assert values == pytest.approx(distribution[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-5)


def test_a_saved_model_is_whole_and_loads_in_transformers(tmp_path: Path) -> None:
    trained = Learner(LearnerConfig(model=default_model(), lr=1e-2))
    for version in range(2):
        trained.step(rows_of_lengths(2, 3, version=version))
        trained.save(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(map(torch.equal, loaded.parameters(), trained.model.parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([5]) == AutoTokenizer.from_pretrained(
        default_model()
    ).decode([5])


def test_the_mismatch_of_a_bf16_learner_stays_where_it_is_over_updates_that_change_nothing() -> None:
    batch, gaps = rows_of_lengths(6, 10, 8, 9), []
    behaviour = batch.behaviour.copy()
    behaviour[batch.live] = learner().score(batch)
    AcceleratorState._reset_state(reset_partial_state=True)
    rounded = learner(mixed_precision="bf16", lr=1e-30)
    for version in range(50):
        metrics = rounded.step(replace(batch, version=version, behaviour=behaviour, staleness=0 * batch.staleness))
        gaps.append(metrics.fresh.abs_mean)
    assert 1e-4 < np.mean(gaps[:10]) < 0.1, "bf16 layers differ from fp32 ones by their numerics"
    assert np.mean(gaps[-10:]) <= 1.5 * np.mean(gaps[:10])
