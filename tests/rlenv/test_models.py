"""The shipped model and its tokenizer: what loads, what round-trips, what the base can do and cannot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlenv.models import corpus, default_model
from rlenv.models.build import build
from rlenv.models.tokenizer import END, PAD, PHRASES, START
from rlenv.tasks.math import boxed_integer, problems

TOKENIZER = AutoTokenizer.from_pretrained(default_model())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(default_model()).eval()


def test_the_model_loads_in_fp32_with_one_row_per_token(model: PreTrainedModel) -> None:
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(TOKENIZER)
    assert model.config.max_position_embeddings >= 512
    assert 800_000 <= sum(weight.numel() for weight in model.parameters()) <= 1_000_000


def test_the_weights_are_one_file_of_at_most_two_mebibytes() -> None:
    (weights,) = Path(default_model()).glob("*.safetensors")
    assert weights.stat().st_size <= 2 * 2**20


def test_loading_in_fp32_loses_nothing_of_the_stored_weights(model: PreTrainedModel) -> None:
    stored = load_file(Path(default_model()) / "model.safetensors")
    loaded = dict(model.named_parameters())
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value.float()) for name, value in stored.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


@settings(deadline=None)
@given(st.text())
def test_every_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([START, END, PAD, *PHRASES, "\n", " ", "²", "🙂", "а", "\x00", "<|im", "\\box"])))
def test_texts_of_phrases_round_trip(parts: list[str]) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("".join(parts))) == "".join(parts)


@settings(deadline=None)
@given(st.binary())
def test_bytes_are_their_own_ids(data: bytes) -> None:
    assert TOKENIZER.decode(list(data)) == data.decode(errors="replace")


@pytest.mark.parametrize("marker", [START, END, PAD, *PHRASES])
def test_each_marker_is_one_token(marker: str) -> None:
    assert len(TOKENIZER.encode(marker)) == 1


def test_only_control_tokens_vanish_from_shown_text() -> None:
    ids = TOKENIZER.encode(f"{START}assistant\n\\boxed{{85}}{END}")
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "assistant\n\\boxed{85}"


def test_a_control_token_in_plain_text_can_be_spelled_out() -> None:
    ids = TOKENIZER.encode(END, split_special_tokens=True)
    assert TOKENIZER.eos_token_id not in ids
    assert TOKENIZER.decode(ids) == END


def test_the_end_token_closes_a_turn_and_is_not_the_padding() -> None:
    assert TOKENIZER.eos_token == END
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
    assert AutoConfig.from_pretrained(default_model()).eos_token_id == TOKENIZER.eos_token_id


def test_the_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    )
    assert _prompt(corpus.Sum("u", 0, 0)) == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def test_no_evaluation_problem_is_in_the_warm_start() -> None:
    warm = {problem.text for problem in corpus.train_problems()}
    held_out = {text for text, _ in problems(2, "eval")}
    assert len(warm) + len(held_out) == 8100
    assert not warm & held_out


def test_working_is_always_right() -> None:
    assert all(boxed_integer(corpus.work(a, b)) == a + b for _, a, b in corpus.train_problems())
    assert corpus.work(47, 38) == "7+8=15,4+3+1=8 \\boxed{85}"
    assert corpus.work(42, 31) == "2+1=3,4+3=7 \\boxed{73}"


def test_a_guess_is_right_one_time_in_five() -> None:
    rng = random.Random(0)
    right = [boxed_integer(corpus.guess(a, b, rng)) == a + b for _, a, b in corpus.train_problems()]
    assert 0.18 < sum(right) / len(right) < 0.22


def test_the_base_is_right_less_than_half_the_time(model: PreTrainedModel) -> None:
    asked = _held_out(128)
    answers = _answer(model, [_prompt(problem) for problem in asked], greedy=False)
    assert 0.25 < _accuracy(asked, answers) < 0.5
    assert 0.15 < sum("=" in answer for answer in answers) / len(answers) < 0.4


def test_the_base_guesses_greedily_and_works_when_it_has_begun_to(model: PreTrainedModel) -> None:
    asked = _held_out(64)
    guesses = _answer(model, [_prompt(problem) for problem in asked], greedy=True)
    assert not any("=" in answer for answer in guesses)
    assert _accuracy(asked, guesses) < 0.5
    begun = [f"{_prompt(problem)}{problem.a % 10}" for problem in asked]
    assert _accuracy(asked, _answer(model, begun, greedy=True)) > 0.9


def test_building_writes_the_shipped_tokenizer_and_config(tmp_path: Path) -> None:
    build(tmp_path, steps=1)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (Path(default_model()) / name).read_text()
    built, shipped = (AutoConfig.from_pretrained(folder).to_diff_dict() for folder in (tmp_path, default_model()))
    assert built == shipped


@pytest.mark.slow
def test_a_seed_builds_the_same_weights_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(tmp_path / name, steps=2, seed=3)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def _held_out(count: int) -> list[corpus.Sum]:
    rows = random.Random(0).sample(problems(2, "eval"), count)
    return [corpus.parse(text) for text, _ in rows]


def _prompt(problem: corpus.Sum) -> str:
    message = {"role": "user", "content": problem.text}
    return str(TOKENIZER.apply_chat_template([message], add_generation_prompt=True, tokenize=False))


@torch.inference_mode()
def _answer(model: PreTrainedModel, prompts: list[str], *, greedy: bool) -> list[str]:
    """Continue prompts of one length together."""
    ids = torch.tensor([TOKENIZER.encode(prompt) for prompt in prompts])
    torch.manual_seed(0)
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=not greedy, top_k=0, max_new_tokens=24)
    return TOKENIZER.batch_decode(rows[:, ids.shape[1] :], skip_special_tokens=True)


def _accuracy(asked: list[corpus.Sum], answers: list[str]) -> float:
    right = [boxed_integer(answer) == problem.a + problem.b for problem, answer in zip(asked, answers, strict=True)]
    return sum(right) / len(right)
