import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rows import group, tiny_model, trajectory
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlenv.agents import exact, gradients
from rlenv.agents import policy as policy_module
from rlenv.agents.advantages import score
from rlenv.agents.exact import ExactPolicy
from rlenv.agents.gradients import torch_kernels
from rlenv.agents.learner import Learner
from rlenv.agents.learner_types import LearnerConfig, Scoring
from rlenv.agents.packing import Batch, micro_batches, pack
from rlenv.agents.policy import Policy
from rlenv.engine import kernels as engine_kernels
from rlenv.engine.kernels import Kernels, Rows, vllm_kernels
from rlenv.errors import ConfigError
from rlenv.types import Sample

SHAPE: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_accelerator_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | settings)))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, start where nothing shows
            parameter += 0.2 * torch.randn_like(parameter)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tiny_model(attention_bias=True),
    "llama with a tied head": lambda: llama(tie_word_embeddings=True),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama 3 with scaled rotary frequencies": lambda: llama(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    ),
}  # fmt: skip

PLAIN = torch.tensor([[1.0, 1.0, 0.0]])  # temperature, top-p, top-k


def batch(temperature: float = 1.0) -> Batch:
    plain = (trajectory((1, 2, 3), (4, 5), reward=1), trajectory((6,), (7, 8, 9, 0, 10)), trajectory((11,), (12,)))
    rows = [replace(row, info={"samples": (Sample(temperature=temperature),)}) for row in plain]
    return pack(score([group(*rows)]), version=0)


def inputs(temperature: float = 1.0, rows: list[int] | None = None) -> list[Tensor]:
    chosen = batch(temperature) if rows is None else batch(temperature).select(rows)
    micro = next(micro_batches(chosen, 100))
    return list(map(torch.from_numpy, (micro.token_ids, micro.attention_mask, micro.live, micro.sampling)))


def exact_policy(model: Any, dtype: torch.dtype = torch.float32) -> ExactPolicy:
    return ExactPolicy(model, kernels=torch_kernels(dtype))


def gradients_of(policy: Policy) -> dict[str, Tensor]:
    policy.zero_grad()
    logprobs, _ = policy(*inputs(0.6))
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_walk_over_the_layers_computes_what_the_model_computes(make: Callable[[], Any], temperature: float) -> None:
    model = make()
    expected, result = Policy(model)(*inputs(temperature)), exact_policy(model)(*inputs(temperature))
    for values, others in zip(result, expected, strict=True):
        torch.testing.assert_close(values, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_parameter_gets_the_gradient_that_autograd_finds_through_the_model(make: Callable[[], Any]) -> None:
    model = make()
    expected, result = gradients_of(Policy(model)), gradients_of(exact_policy(model))
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (result[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
        assert gradient.norm() > 0, name


def test_rows_that_are_padded_have_the_values_they_have_alone() -> None:
    policy = exact_policy(tiny_model())
    alone = torch.cat([policy(*inputs(rows=[row]))[0] for row in (1, 0, 2)])  # the longest first, as in the batch
    torch.testing.assert_close(policy(*inputs())[0], alone, rtol=0, atol=1e-6)


def test_the_number_that_pads_is_not_read() -> None:
    policy, (ids, mask, *rest) = exact_policy(tiny_model()), inputs()
    assert not mask.all()
    assert torch.equal(policy(ids, mask, *rest)[0], policy(ids.masked_fill(~mask, 5), mask, *rest)[0])


def test_chunks_of_the_head_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    whole = exact_policy(model)(*inputs())[0], gradients_of(exact_policy(model))
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 50)
    torch.testing.assert_close(exact_policy(model)(*inputs())[0], whole[0])
    for name, gradient in gradients_of(exact_policy(model)).items():
        torch.testing.assert_close(gradient, whole[1][name], rtol=1e-4, atol=1e-6)


def test_values_are_the_kernels_and_gradients_the_twins() -> None:
    def doubled(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return 2 * gradients._rms_norm(x, weight, epsilon)

    kernels = gradients.with_gradients(replace(torch_kernels(torch.float32), rms_norm=doubled))
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    result = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(result, doubled(x, weight, 1e-6))
    upstream = torch.randn(3, 8)
    found = torch.autograd.grad(result, (x, weight), upstream)
    expected = torch.autograd.grad(gradients._rms_norm(x, weight, 1e-6), (x, weight), upstream)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other)


def test_kernels_run_in_the_order_of_the_engines_layers_with_joined_projections() -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []

    def recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = kernel(*arguments)
            calls.append((name, tuple((result[0] if isinstance(result, tuple) else result).shape)))
            return result

        return call

    kernels = torch_kernels(torch.float32)
    names = [field.name for field in fields(Kernels) if field.name != "dtype"]
    kernels = replace(kernels, **{name: recorded(name, getattr(kernels, name)) for name in names})
    with torch.no_grad():
        ExactPolicy(llama(), kernels=kernels)(*inputs(rows=[1]))
    layer = [
        ("linear", (5, 64)), ("rotary", (5, 32)), ("attention", (5, 4, 8)), ("linear", (5, 32)),
        ("add_rms_norm", (5, 32)), ("linear", (5, 96)), ("silu_and_mul", (5, 48)), ("linear", (5, 32)),
        ("add_rms_norm", (5, 32)),
    ]  # fmt: skip
    end = [("head", (5, 24)), ("logprobs", (5,))]
    assert calls == [("cos_sin", (128, 8)), ("rms_norm", (5, 32)), *layer, *layer, *end]


def test_activations_are_bf16_logits_and_parameters_and_gradients_fp32() -> None:
    dtypes: dict[str, set[torch.dtype]] = {}

    def recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            given = [argument for argument in arguments if isinstance(argument, Tensor)]
            dtypes.setdefault(name, set()).update(tensor.dtype for tensor in given if tensor.is_floating_point())
            return kernel(*arguments)

        return call

    kernels = torch_kernels(torch.bfloat16)
    names = ("linear", "rms_norm", "add_rms_norm", "rotary", "attention", "silu_and_mul", "logprobs")
    kernels = replace(kernels, **{name: recorded(name, getattr(kernels, name)) for name in names})
    policy = ExactPolicy(tiny_model(), kernels=kernels)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropies = policy(*inputs())
    logprobs.sum().backward()
    assert dtypes.pop("logprobs") == {torch.float32}
    assert dtypes == {name: {torch.bfloat16} for name in names[:-1]}
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}
    torch.testing.assert_close(logprobs, Policy(policy.model)(*inputs())[0], rtol=0, atol=0.1)


def test_autocast_does_not_reach_the_kernels() -> None:
    policy = exact_policy(tiny_model())
    with torch.autocast("cpu", torch.bfloat16):
        inside = policy(*inputs())[0]
    assert torch.equal(inside, policy(*inputs())[0])


def test_a_policy_that_first_scored_in_inference_mode_can_train() -> None:
    policy = exact_policy(tiny_model())
    with torch.inference_mode():
        scored, _ = policy(*inputs())
    logprobs, _ = policy(*inputs())
    logprobs.sum().backward()
    assert torch.equal(scored.clone(), logprobs.detach())


def test_a_learner_with_engine_ops_scores_and_trains_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "vllm_kernels", lambda: torch_kernels(torch.bfloat16))
    learner = Learner(LearnerConfig("random", device="cuda", engine_ops=True), model=tiny_model())
    before = learner.logprobs([[6, 7, 8, 9]])[0]
    by_policy = ExactPolicy(learner.model, kernels=torch_kernels(torch.bfloat16))
    expected, _ = by_policy(
        torch.tensor([[6, 7, 8, 9]]), torch.ones(1, 4), torch.arange(4)[None] > 0, PLAIN.expand(3, 3)
    )
    assert before == expected.tolist() != Policy(learner.model)(*inputs(rows=[0]))[0].tolist()
    assert learner.step(batch()).grad_norm > 0
    assert learner.logprobs([[6, 7, 8, 9]])[0] != before


@pytest.mark.filterwarnings("ignore")  # what libraries say of one another while vLLM is imported
def test_those_of_vllms_ops_that_also_run_on_a_cpu_compute_what_the_twins_compute() -> None:
    twins, device, config = torch_kernels(torch.float32), torch.device("cpu"), llama().config
    table = twins.cos_sin(config, device)
    assert torch.equal(engine_kernels._cos_sin(config, device), table.bfloat16())
    query, key, value, gate_up = (torch.randn(5, width) for width in (32, 16, 32, 96))
    weight, positions = torch.rand(32), torch.tensor([0, 1, 2, 0, 1])
    for kernel, twin, arguments in (
        (engine_kernels._rotary, twins.rotary, (positions, query, key, table)),
        (engine_kernels._add_rms_norm, twins.add_rms_norm, (query, value, weight, 1e-5)),
        (engine_kernels._silu_and_mul, twins.silu_and_mul, (gate_up,)),
    ):
        before = [argument.clone() for argument in arguments if isinstance(argument, Tensor)]
        torch.testing.assert_close(kernel(*arguments), twin(*arguments))
        after = [argument for argument in arguments if isinstance(argument, Tensor)]
        assert all(map(torch.equal, before, after)), f"{kernel.__name__} changed what it was given"


def test_packing_leaves_padding_out_and_padding_puts_zeros_in() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rows = Rows(mask, torch.tensor([[False, True, True], [False, True, True]]))
    assert rows.singles.tolist() == [1, 2], "padding is no token"
    packed = rows.pack(torch.arange(1, 7).view(2, 3, 1))
    assert packed[:, 0].tolist() == [1, 2, 3, 4]
    assert rows.pad(packed)[..., 0].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert rows.positions.tolist() == [0, 1, 2, 0]
    assert rows.lengths.tolist() == [3, 1] and rows.starts.tolist() == [0, 3, 4]
    assert rows.lengths.dtype == rows.starts.dtype == torch.int32


def qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def sliding() -> Any:
    return tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (qwen2, "do not cover Qwen2ForCausalLM, only LlamaForCausalLM and Qwen3ForCausalLM"),
        (sliding, "sliding windows"),
        (lambda: llama(hidden_act="gelu"), "hidden_act"),
    ],
)
def test_a_model_that_is_not_covered_is_refused_by_name(make: Callable[[], Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        exact_policy(make())


def test_without_a_gpu_engine_ops_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="need an NVIDIA GPU"):
        vllm_kernels()
    with pytest.raises(ConfigError, match="device='cpu'"):
        LearnerConfig("random", engine_ops=True)


@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_a_gpu_without_flash_attention_3_is_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ConfigError, match=rf"9\.0 .* has {capability[0]}\.{capability[1]}"):
        vllm_kernels()


def test_a_learner_without_vllms_gpu_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_kernels, "_check_gpu", lambda: None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # put back afterwards
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"need vLLM 0\.32 with its GPU kernels"):
        vllm_kernels()


def test_engine_ops_by_another_scoring_than_the_engine_s_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave scoring as it is"):
        LearnerConfig("random", device="cuda", engine_ops=True, scoring=Scoring(head="bfloat16"))


def test_attention_is_told_which_tokens_the_engine_took_in_one_by_one() -> None:
    told: list[Rows] = []
    kernels = torch_kernels(torch.float32)

    def attention(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
        told.append(rows)
        return kernels.attention(query, key, value, rows)

    policy = ExactPolicy(tiny_model(), kernels=replace(kernels, attention=attention))
    policy(*inputs(rows=[0]))  # prompt 1 2 3, sampled 4 5: the last is only ever a target
    assert told[0].positions[told[0].singles].tolist() == [3]
