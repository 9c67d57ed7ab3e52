import math

import pytest
import torch
from rows import group, tiny_model, trajectory

from rlenv.agents import policy as policy_module
from rlenv.agents.advantages import score
from rlenv.agents.learner_types import Scoring
from rlenv.agents.packing import MicroBatch, micro_batches, pack
from rlenv.agents.policy import Policy
from rlenv.errors import ConfigError
from rlenv.types import Sample


def micro_batch(temperature: float = 1.0) -> MicroBatch:
    sample = Sample(temperature=temperature)
    rows = (trajectory((1, 2, 3), (4, 5), reward=1, sample=sample), trajectory((6,), (7, 8, 9, 0, 10), sample=sample))
    return next(micro_batches(pack(score([group(*rows)]), version=0), 100))


def forward(policy: Policy, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (micro.token_ids, micro.attention_mask, micro.live, micro.sampling)
    return policy(*map(torch.from_numpy, arrays))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_are_those_of_the_whole_logits_of_each_row_alone(temperature: float) -> None:
    model = tiny_model()
    logprobs, entropies = forward(Policy(model), micro_batch(temperature))
    expected, expected_entropies = [], []
    for ids, start in (([6, 7, 8, 9, 0, 10], 1), ([1, 2, 3, 4, 5], 3)):
        distribution = torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, -1)
        for position in range(start, len(ids)):
            expected.append(distribution[position - 1, ids[position]].item())
            entropy = torch.distributions.Categorical(logits=distribution[position - 1]).entropy()
            expected_entropies.append(entropy.item())
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    assert entropies.tolist() == pytest.approx(expected_entropies, abs=1e-5)


def test_exactly_the_sampled_ids_are_predicted_and_prompt_ids_are_not_targets() -> None:
    policy, micro = Policy(tiny_model()), micro_batch()
    logprobs, _ = forward(policy, micro)
    assert len(logprobs) == 2 + 5
    # The first sampled id is among them: another id there has another log-prob, and the next id another context.
    changed = micro.token_ids.copy()
    changed[1, 3] = 11
    others = policy(*map(torch.from_numpy, (changed, micro.attention_mask, micro.live, micro.sampling)))[0]
    assert (others != logprobs).tolist() == [False] * 5 + [True, True]


def test_the_number_that_pads_changes_nothing() -> None:
    policy, micro = Policy(tiny_model()), micro_batch()
    assert not micro.attention_mask.all()
    results = []
    for number in (0, 5):
        ids = torch.from_numpy(micro.token_ids).masked_fill(~torch.from_numpy(micro.attention_mask), number)
        rest = (micro.attention_mask, micro.live, micro.sampling)
        results.append(policy(ids, *map(torch.from_numpy, rest))[0])
    assert torch.equal(*results)


def test_chunks_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for logits_per_chunk in (2**24, 50, 1):
        monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", logits_per_chunk)
        policy = Policy(tiny_model())
        logprobs, entropies = forward(policy, micro_batch())
        logprobs.sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        results.append((logprobs.detach(), entropies, gradient))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_no_logits_are_kept_for_the_backward_pass_once_there_are_several_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def logits_kept() -> int:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
            forward(Policy(tiny_model()), micro_batch())
        return sum(tensor.shape[-1] == 24 for tensor in kept if tensor.ndim == 2 and tensor.shape[0] != 32)

    assert logits_kept() > 0
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 24)
    assert logits_kept() == 0


def test_a_bf16_model_is_scored_in_fp32_by_an_fp32_head() -> None:
    model = tiny_model().bfloat16()
    hidden = Policy(model)._hidden(torch.tensor([[6, 7, 8, 9, 0]]), *torch.ones(2, 1, 5, dtype=torch.bool))[0].float()
    exact = torch.log_softmax(hidden @ model.lm_head.weight.float().T, -1)
    expected = exact[range(5), [7, 8, 9, 0, 10]]
    rounded, _ = forward(Policy(model, Scoring(head="bfloat16")), micro_batch())
    logprobs, _ = forward(Policy(model), micro_batch())
    assert logprobs.dtype == rounded.dtype == torch.float32
    assert logprobs[:5].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert (rounded[:5] - expected).abs().max() > 1e-3


def test_an_fp32_head_stays_fp32_under_autocast() -> None:
    policy = Policy(tiny_model())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert policy._logits(torch.ones(1, 32)).dtype == torch.float32


def test_dropout_is_off() -> None:
    policy, micro = Policy(tiny_model(attention_dropout=0.5)), micro_batch()
    assert torch.equal(forward(policy, micro)[0], forward(policy, micro)[0])


def test_a_model_that_changes_its_logits_behind_the_head_is_refused() -> None:
    model = tiny_model()
    forward_of_model = model.forward

    def soft_capped(*args: object, **kwargs: object) -> object:
        output = forward_of_model(*args, **kwargs)
        output.logits = 2 * torch.tanh(output.logits / 2)
        return output

    model.forward = soft_capped
    with pytest.raises(ConfigError, match="behind the output head"):
        Policy(model)


def test_entropy_of_a_uniform_policy_is_log_of_the_vocabulary() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert forward(Policy(model), micro_batch())[1].tolist() == pytest.approx([math.log(24)] * 7)
