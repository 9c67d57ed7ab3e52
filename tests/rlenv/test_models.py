"""The shipped model and its tokenizer: what loads, what round-trips, what the base can do."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlenv.models import default_model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(default_model())


def test_the_model_loads_in_fp32_with_one_row_per_token(tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(default_model())
    assert str(model.dtype) == "torch.float32"
    assert model.config.vocab_size == len(tokenizer)
    assert sum(weight.numel() for weight in model.parameters()) < 1_000_000


def test_the_weights_are_one_file_of_at_most_two_mebibytes() -> None:
    (weights,) = Path(default_model()).glob("*.safetensors")
    assert weights.stat().st_size <= 2 * 2**20
