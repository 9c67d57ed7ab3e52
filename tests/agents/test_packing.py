import pickle
from dataclasses import replace

import numpy as np
import pytest
from rows import group, trajectory

from rlenv.agents.advantages import score
from rlenv.agents.packing import Batch, micro_batches, pack, rows_to_score
from rlenv.errors import ConfigError, GroupError
from rlenv.types import Sample, Trajectory, VersionSpan


def packed(*trajectories: Trajectory, version: int = 0) -> Batch:
    return pack(score([group(*trajectories)]), version=version)


def rows_of_lengths(*lengths: int) -> Batch:
    return packed(*(trajectory((9,), range(10, 10 + n), reward=i) for i, n in enumerate(lengths)))


def test_rows_lie_end_to_end_with_their_numbers() -> None:
    batch = packed(
        trajectory((7, 8), (3, 2), reward=0, logprobs=(-0.5, -0.25)), trajectory((7,), (5,), reward=1, logprobs=(-2.0,))
    )
    assert batch.token_ids.tolist() == [7, 8, 3, 2, 7, 5]
    assert batch.live.tolist() == [False, False, True, True, False, True]
    assert batch.behaviour.tolist() == [0, 0, -0.5, -0.25, 0, -2.0]
    assert batch.offsets.tolist() == [0, 4, 6]
    assert batch.advantages.tolist() == [-1.0, 1.0]
    assert batch.live_tokens == 3


def test_staleness_is_per_token_and_counts_versions() -> None:
    spans = (VersionSpan("3", 2, 4), VersionSpan("5#2", 4, 5, stale_context=True))
    batch = packed(trajectory((7, 8), (3, 4, 2), reward=1, spans=spans), trajectory(version=5), version=5)
    assert batch.staleness[:5].tolist() == [0, 0, 2, 2, 0]
    assert batch.stale_context[:5].tolist() == [False, False, False, False, True]


def test_tokens_of_a_later_version_are_refused() -> None:
    with pytest.raises(ValueError, match="sampled by version 6 cannot train version 5"):
        packed(trajectory(version=6), trajectory(version=5), version=5)


def test_text_behind_the_last_sampled_id_is_cut_off() -> None:
    row = Trajectory(
        task="toy",
        seed=0,
        token_ids=(7, 3, 2, 9, 9, 4, 9),
        loss_mask=(False, True, True, False, False, True, False),
        logprobs=(0.0, -1.0, -1.0, 0.0, 0.0, -1.0, 0.0),
        spans=(VersionSpan("0", 1, 3), VersionSpan("0", 5, 6)),
        messages=(),
        reward=1.0,
        terminated=True,
        truncated=False,
        turns=2,
    )
    batch = packed(row, trajectory())
    assert batch.token_ids[:6].tolist() == [7, 3, 2, 9, 9, 4]
    assert batch.lengths.tolist() == [6, 4]
    assert batch.live[:6].tolist() == [False, True, True, False, False, True]


def test_padding_never_masks_a_real_id_of_the_same_number() -> None:
    # The end token and a prompt id are 0 and 2, whatever number pads.
    batch = packed(trajectory((2, 0, 4), (11, 12, 0), reward=1), trajectory((4, 4), (5, 6, 7, 8, 9, 2)))
    micro = next(micro_batches(batch, 100))
    assert micro.rows.tolist() == [1, 0]
    assert micro.attention_mask[1].tolist() == [True] * 6 + [False] * 2
    assert micro.live[1].tolist() == [False] * 3 + [True] * 3 + [False] * 2
    assert micro.token_ids[1, :6].tolist() == [2, 0, 4, 11, 12, 0]


def test_live_numbers_are_flat_and_in_row_order() -> None:
    batch = packed(
        trajectory((7, 8), (3, 2), reward=0, logprobs=(-0.5, -0.25)), trajectory((7,), (5,), reward=1, logprobs=(-2.0,))
    )
    micro = next(micro_batches(batch, 100))
    assert micro.token_ids[micro.live].tolist() == [3, 2, 5]
    assert micro.behaviour.tolist() == [-0.5, -0.25, -2.0]
    assert micro.advantages.tolist() == [-1.0, -1.0, 1.0]


@pytest.mark.parametrize(("max_tokens", "sizes"), [(1, [1, 1, 1, 1]), (22, [2, 2]), (44, [4])])
def test_micro_batches_keep_the_token_budget_and_lose_no_row(max_tokens: int, sizes: list[int]) -> None:
    parts = list(micro_batches(rows_of_lengths(2, 10, 3, 9), max_tokens))
    assert [len(part.rows) for part in parts] == sizes
    assert [row for part in parts for row in part.rows] == [1, 3, 2, 0]
    assert sum(int(part.live.sum()) for part in parts) == 24
    assert all(part.token_ids.size <= max_tokens or len(part.rows) == 1 for part in parts)


def test_selecting_rows_keeps_the_normaliser_of_the_whole_batch() -> None:
    batch = rows_of_lengths(2, 10, 3, 9)
    part = batch.select([1, 2])
    assert part.lengths.tolist() == [11, 4]
    assert part.token_ids.tolist() == [9, *range(10, 20), 9, 10, 11, 12]
    assert part.live_tokens == batch.live_tokens == 24


def test_shards_deal_out_the_rows_by_length() -> None:
    batch = rows_of_lengths(2, 10, 3, 9)
    shards = [batch.shard(rank, 2) for rank in range(2)]
    assert [shard.lengths.tolist() for shard in shards] == [[11, 4], [10, 3]]
    assert [shard.live_tokens for shard in shards] == [24, 24]


def test_minibatches_cover_the_batch_once_and_have_normalisers_of_their_own() -> None:
    batch = rows_of_lengths(2, 10, 3, 9)
    parts = batch.minibatches(3, seed=1)
    assert sorted(length for part in parts for length in part.lengths.tolist()) == [3, 4, 10, 11]
    assert [part.live_tokens for part in parts] == [int(part.live.sum()) for part in parts]
    assert [part.lengths.tolist() for part in batch.minibatches(3, seed=1)] == [p.lengths.tolist() for p in parts]
    assert len(batch.minibatches(9, seed=1)) == 4


def test_a_batch_survives_pickling() -> None:
    batch = rows_of_lengths(2, 3)
    copy = pickle.loads(pickle.dumps(batch))
    assert np.array_equal(copy.token_ids, batch.token_ids) and copy.live_tokens == 5


def test_nothing_to_train_on_is_an_error_that_counts() -> None:
    with pytest.raises(GroupError, match=r"1 groups without a survivor, 1 with one.*TimeoutError': 7"):
        pack(score([group(failures=4), group(trajectory(), failures=3)]), version=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_gradient_is_refused(temperature: float) -> None:
    greedy = trajectory(sample=Sample(temperature=temperature))
    with pytest.raises(ConfigError, match=r"temperature > 0, e\.g\. 1\.0"):
        packed(greedy, trajectory())


def test_banned_end_tokens_are_refused_as_the_learner_knows_nothing_of_them() -> None:
    with pytest.raises(ConfigError, match=r"min_tokens 3 .* leave it at 0"):
        packed(trajectory(sample=Sample(min_tokens=3)), trajectory())


def two_turns(*samples: Sample, between: tuple[int, ...] = (9,)) -> Trajectory:
    """Prompt 7, sampled 3 2, `between`, sampled 4."""
    ids = (7, 3, 2, *between, 4)
    sampled = (False, True, True, *[False] * len(between), True)
    spans = (VersionSpan("0", 1, 3), VersionSpan("0", len(ids) - 1, len(ids)))
    row = trajectory((7,), ids[1:], spans=spans)
    return replace(row, loss_mask=sampled, info={"samples": samples})


def test_each_turn_keeps_the_way_it_was_sampled() -> None:
    batch = packed(two_turns(Sample(temperature=0.5, top_p=0.9), Sample(temperature=2.0, top_k=20)), trajectory())
    first, second, plain = [0.5, np.float32(0.9), 0], [2, 1, 20], [1, 1, 0]
    assert batch.sampling[batch.live].tolist() == [first, first, second, plain, plain]
    micro = next(micro_batches(batch, 100))
    assert micro.sampling.tolist() == [first, first, second, plain, plain]


def test_turns_that_were_sampled_differently_and_run_into_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 samples of different temperature, .* but 1 sampled turns"):
        packed(two_turns(Sample(temperature=0.5), Sample(temperature=2.0), between=()), trajectory())


def test_a_sampled_id_without_a_finite_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match="no finite log-prob"):
        packed(trajectory(logprobs=(float("nan"), -1.0)), trajectory())


def test_a_first_id_cannot_have_been_sampled() -> None:
    with pytest.raises(ValueError, match="first id is marked as sampled"):
        packed(trajectory(prompt=()), trajectory())


def test_rows_to_score_have_every_id_but_the_first_live() -> None:
    batch = rows_to_score([[4, 5, 6], [7], [8, 9]])
    assert batch.live.tolist() == [False, True, True, False, False, True]
