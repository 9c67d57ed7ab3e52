"""The infos of single environments go in, Gymnasium's batched infos come out: an array and a mask per key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_PLAIN_NUMBERS = {bool, int, float}


def batch_infos(infos: Mapping[int, Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Infos by row → `{key: array [count], "_key": mask [count]}`, dicts recursively.

    As `VectorEnv._add_info`, but the array's type fits all its values: numbers are promoted (an int in one row
    does not cut the fraction off another's), and mixed values stay objects.

    >>> batch_infos({0: {"score": 1}, 2: {"score": 0.5}}, 3)
    {'score': array([1. , 0. , 0.5]), '_score': array([ True, False,  True])}
    """
    batched: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos.values() for key in info):
        rows = {row: info[key] for row, info in infos.items() if key in info}
        batched[key], batched[f"_{key}"] = _column(key, rows, count), _mask(rows, count)
    return batched


def snapshot(value: Any) -> Any:
    """The same value in containers of its own: an environment may reuse the dict that it returned."""
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) is list:
        return [snapshot(item) for item in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _column(key: str, rows: Mapping[int, Any], count: int) -> Any:
    values = [*rows.values()]
    kinds = {*map(type, values)}
    if key == "final_obs":
        column = np.full(count, None, dtype=object)
    elif kinds == {dict}:
        return batch_infos(rows, count)
    elif all(kind in _PLAIN_NUMBERS or issubclass(kind, np.number) for kind in kinds):
        column = np.zeros(count, dtype=kinds.pop() if len(kinds) == 1 else np.result_type(*kinds))
    elif kinds == {np.ndarray} and len({(value.shape, value.dtype) for value in values}) == 1:
        column = np.zeros((count, *values[0].shape), dtype=values[0].dtype)
    else:
        column = np.full(count, None, dtype=object)
    for row, value in rows.items():
        column[row] = value
    return column


def _mask(rows: Mapping[int, Any], count: int) -> Any:
    mask = np.zeros(count, dtype=np.bool_)
    if len(rows) == count:
        mask[:] = True
    else:
        mask[[*rows]] = True
    return mask
