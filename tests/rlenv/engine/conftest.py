"""Groups of scripted engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlenv.engine.group import EngineGroup
from tests.rlenv.engine.groups import Failing


@pytest.fixture
def group_of(char_tokenizer: Any) -> Iterator[Callable[..., tuple[EngineGroup, list[Failing]]]]:
    """`group_of(n, **options)` starts n engines, 2 ms a token, and a group of them, and closes it."""
    groups: list[EngineGroup] = []

    def start(number: int = 2, *, policy: Any = None, update_s: float = 1.0, **options: Any) -> Any:
        policy = policy or (lambda prompt_ids, sample: list(range(10, 36)) * 40)
        settings = {"delay": 0.002, "max_model_len": 2048} | options
        engines = [Failing(char_tokenizer, policy, **settings) for _ in range(number)]
        groups.append(EngineGroup(engines, answer_s=0.6, update_s=update_s))
        return groups[-1], engines

    yield start
    for group in groups:
        group.close()
