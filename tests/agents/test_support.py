from __future__ import annotations

import pytest
import torch
from rows import group, tiny_model, trajectory
from torch.nn.functional import log_softmax

from rlenv.agents.advantages import score
from rlenv.agents.learner_types import Scoring
from rlenv.agents.packing import micro_batches, pack
from rlenv.agents.policy import Policy
from rlenv.agents.support import restrict
from rlenv.types import Sample

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))


def left(top_p: float = 1.0, top_k: int = 0, sampled: int = 1, logits: torch.Tensor = LOGITS) -> list[int]:
    rows = restrict(logits, torch.tensor([top_p]), torch.tensor([float(top_k)]), torch.tensor([sampled]))
    return rows[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 0, [0, 1, 2, 3]),
        (1.0, 2, [1, 3]),
        (1.0, 99, [0, 1, 2, 3]),
        (0.65, 0, [1, 3]),  # the rest adds up to 0.3, at most 1 - 0.65
        (0.75, 0, [1, 2, 3]),
        (1e-6, 0, [1]),
        (0.5, 3, [1, 3]),  # top-p acts on what top-k left: 4/9 + 3/9
        (0.75, 2, [1, 3]),
    ],
)
def test_the_ids_that_could_be_drawn_are_left(top_p: float, top_k: int, expected: list[int]) -> None:
    assert left(top_p, top_k) == expected


def test_ties_at_the_last_place_of_top_k_stay() -> None:
    assert left(top_k=2, logits=torch.tensor([[2.0, 1.0, 1.0, 0.0]]), sampled=0) == [0, 1, 2]


def test_the_id_that_was_sampled_is_always_left() -> None:
    assert left(top_k=1, sampled=0) == [0, 1]
    assert left(top_p=0.4, sampled=2) == [1, 2]


def test_each_row_has_limits_of_its_own() -> None:
    rows = restrict(
        LOGITS.repeat(3, 1), torch.tensor([1.0, 0.4, 1.0]), torch.tensor([1.0, 0, 0]), torch.tensor([1] * 3)
    )
    assert rows.isfinite().sum(-1).tolist() == [1, 1, 4]


def test_the_policy_scores_over_the_ids_that_could_be_drawn_and_its_gradient_is_finite() -> None:
    model = tiny_model()
    rows = [trajectory((1, 2), (3, 4), reward=r, sample=Sample(temperature=0.5, top_k=2)) for r in (0, 1)]
    micro = next(micro_batches(pack(score([group(*rows)]), version=0), 100))
    arrays = [torch.from_numpy(array) for array in (micro.token_ids, micro.attention_mask, micro.live, micro.sampling)]
    logprobs, entropies = Policy(model)(*arrays)
    logits = model(torch.tensor([[1, 2, 3, 4]])).logits[0, 1:3] / 0.5
    for position, sampled in enumerate((3, 4)):
        drawn = {*logits[position].topk(2).indices.tolist(), sampled}
        expected = log_softmax(logits[position][sorted(drawn)], -1)
        assert logprobs[position].item() == pytest.approx(expected[sorted(drawn).index(sampled)].item(), abs=1e-5)
        assert entropies[position].item() == pytest.approx(-(expected.exp() * expected).sum().item(), abs=1e-5)
    logprobs.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    over_all, _ = Policy(model, Scoring(support=False))(*arrays)
    assert (over_all < logprobs).all()
