"""The model that ships with rlenv: a tiny Qwen3 that guesses sums or works them out; its folder comes out."""

from __future__ import annotations

from pathlib import Path


def default_model() -> str:
    """The folder of the shipped model and its tokenizer, loadable by transformers and by vLLM."""
    return str(Path(__file__).parent / "tiny")
