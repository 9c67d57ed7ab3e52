"""Finished groups go in, parquet files with one rollout a row come out, and the same groups are read back from them.

    datasets.load_dataset("parquet", data_files="runs/demo/trajectories/*.parquet")

A row has the exact ids, what was sampled of them and at which log-probs, the weights that sampled each span, the
transcript, the reward turn by turn and by its named parts, and what makes the episode again: the task's `spec` and
reset `options` (both JSON), its seed, and how each turn was sampled. A rollout that failed has its `cause` instead of
a reward. The same groups give the same bytes.

What cannot be written as JSON is null in `spec` and `options`, and text in `info`, which is the environment's last.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from rlenv.errors import ConfigError
from rlenv.types import Failure, Group, Sample, Trajectory, VersionSpan

if TYPE_CHECKING:
    import pyarrow

# A row group, and a part of a folder, holds no more than the last group of rollouts brings it over either.
ROWS_AT_ONCE, IDS_AT_ONCE = 512, 1 << 20
_OWN_COLUMNS = {"rewards", "turn_rewards", "samples", "sample_seed", "options", "spec"}  # of a trajectory's `info`


class TrajectoryFolder:
    """Keeps groups as they come, in parts of bounded size. Safe from several threads at once.

    Each part is whole as soon as it has its name; `close` writes the last. A run that is killed loses only what it
    had not written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._waiting: list[Group] = []
        self._parts = itertools.count(len([*self.folder.glob("*.parquet")]))
        self._lock = threading.Lock()

    def add(self, group: Group) -> None:
        with self._lock:
            self._waiting.append(group)
            if _is_full(self._waiting):
                self._write()

    def close(self) -> None:
        with self._lock:
            if self._waiting:
                self._write()

    def _write(self) -> None:
        write_trajectories(self.folder / f"{next(self._parts):05}.parquet", self._waiting)
        self._waiting = []


def write_trajectories(path: str | Path, groups: Iterable[Group]) -> None:
    """Write one parquet file, which appears under its name when it is complete."""
    import pyarrow.parquet

    path, schema = Path(path), _schema()
    partial = path.with_name(path.name + ".partial")
    try:
        with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for some in _bounded(groups):
                rows = [_row(group, rollout) for group in some for rollout in rollouts_of(group)]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_trajectories(path: str | Path) -> Iterator[Group]:
    """The groups of a file, or of all files of a folder, in the order in which they were written.

    Raises ConfigError when there is no such file, or something else is in it.
    """
    for file in trajectory_files(path):
        rows = _rows(file)
        for (id, task, seed), members in itertools.groupby(rows, lambda row: (row["group"], row["task"], row["seed"])):
            rollouts = [_rollout(row) for row in members]
            yield Group(
                id=id,
                task=task,
                seed=seed,
                trajectories=tuple(one for one in rollouts if isinstance(one, Trajectory)),
                failures=tuple(one for one in rollouts if isinstance(one, Failure)),
            )


def trajectory_files(path: str | Path) -> list[Path]:
    """The parquet files that a path names: itself, or those of a folder or of a run folder's `trajectories`."""
    path = Path(path)
    folder = path / "trajectories" if (path / "trajectories").is_dir() else path
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [path] if path.is_file() else []
    if not files:
        raise ConfigError(f"no trajectories in {path}: name a parquet file, or a run made with --save-trajectories")
    return files


def rollouts_of(group: Group) -> tuple[Trajectory | Failure, ...]:
    """All of a group, in the order of its rows."""
    return (*group.trajectories, *group.failures)


def portable_spec(spec: EnvSpec | None) -> str | None:
    """A spec as JSON, a class in it named by its module (a script's, by its file); None when it has no such form."""
    if spec is None:
        return None
    written, point = copy.copy(spec), spec.entry_point
    if callable(point):
        script = getattr(sys.modules["__main__"], "__file__", None) or "<no file>"
        module = Path(script).stem if point.__module__ == "__main__" else point.__module__
        written.entry_point = f"{module}:{getattr(point, '__qualname__', '<unnamed>')}"
    if "<" in str(written.entry_point):  # within a function: no import reaches it
        return None
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        text: str = written.to_json()
        if EnvSpec.from_json(text) == written:
            return text
    return None


def utf8(text: str) -> str:
    """Text as UTF-8 can hold it: half a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_full(groups: Sequence[Group]) -> bool:
    rows = sum(len(group.trajectories) + len(group.failures) for group in groups)
    ids = sum(len(row.token_ids) for group in groups for row in group.trajectories)
    return rows >= ROWS_AT_ONCE or ids >= IDS_AT_ONCE


def _bounded(groups: Iterable[Group]) -> Iterator[list[Group]]:
    some: list[Group] = []
    for group in groups:
        some.append(group)
        if _is_full(some):
            yield some
            some = []
    if some:
        yield some


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    def table(**columns: pa.DataType) -> pa.DataType:
        return pa.list_(pa.struct(list(columns.items())))

    span = {"label": pa.string(), "start": pa.int32(), "end": pa.int32(), "stale_context": pa.bool_()}
    sample = {
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "top_k": pa.int32(),
        "max_tokens": pa.int32(),
        "min_tokens": pa.int32(),
        "stop": pa.list_(pa.string()),
        "seed": pa.int64(),
        "ignore_eos": pa.bool_(),
    }
    assert [*sample] == [field.name for field in fields(Sample)]
    columns = {
        "group": pa.int64(),
        "task": pa.string(),
        "seed": pa.int64(),
        "sample_seed": pa.int64(),
        "cause": pa.string(),  # null for a rollout with a reward
        "message": pa.string(),
        "reward": pa.float64(),
        "rewards": table(name=pa.string(), value=pa.float64()),
        "turn_rewards": pa.list_(pa.float64()),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "turns": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float64()),
        "spans": table(**span),
        "messages": table(role=pa.string(), content=pa.string()),
        "samples": table(**sample),
        "spec": pa.string(),
        "options": pa.string(),
        "info": pa.string(),
    }
    return pa.schema(list(columns.items()))


def _row(group: Group, rollout: Trajectory | Failure) -> dict[str, Any]:
    info = rollout.info
    row = {
        "group": group.id,
        "task": rollout.task,
        "seed": rollout.seed,
        "sample_seed": info.get("sample_seed"),
        "turn_rewards": info.get("turn_rewards", ()),
        "messages": [{"role": said["role"], "content": utf8(said["content"])} for said in rollout.messages],
        "samples": [asdict(sample) for sample in info.get("samples", ())],
        "spec": portable_spec(info.get("spec")),
        "options": _exact_json(info.get("options", {})),
        "info": _readable_json({key: value for key, value in info.items() if key not in _OWN_COLUMNS}),
        "rewards": [{"name": name, "value": value} for name, value in info.get("rewards", {}).items()],
    }
    if isinstance(rollout, Failure):
        return {**row, "cause": rollout.cause, "message": utf8(rollout.message)}
    own = ("reward", "terminated", "truncated", "turns", "token_ids", "loss_mask", "logprobs")
    spans = [asdict(span) for span in rollout.spans]
    return {**row, **{name: getattr(rollout, name) for name in own}, "spans": spans}


def _rollout(row: Mapping[str, Any]) -> Trajectory | Failure:
    info = json.loads(row["info"])
    info |= {"turn_rewards": tuple(row["turn_rewards"]), "sample_seed": row["sample_seed"]}
    info["samples"] = tuple(Sample(**{**sample, "stop": tuple(sample["stop"])}) for sample in row["samples"])
    info["spec"] = EnvSpec.from_json(row["spec"]) if row["spec"] else None
    if row["options"] is not None:
        info["options"] = json.loads(row["options"])
    info["rewards"] = {part["name"]: part["value"] for part in row["rewards"]}
    messages = tuple(row["messages"])
    if row["cause"] is not None:
        return Failure(row["task"], row["seed"], row["cause"], row["message"], messages, info)
    sequences = {name: tuple(row[name]) for name in ("token_ids", "loss_mask", "logprobs")}
    return Trajectory(
        task=row["task"],
        seed=row["seed"],
        spans=tuple(VersionSpan(**span) for span in row["spans"]),
        messages=messages,
        reward=row["reward"],
        terminated=row["terminated"],
        truncated=row["truncated"],
        turns=row["turns"],
        info=info,
        **sequences,
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        source = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{file} is no parquet file that can be read: {error}") from error
    with source:
        if source.schema_arrow.names != _schema().names:
            raise ConfigError(f"{file} holds other columns than trajectories have: name a file written by rlenv")
        for batch in source.iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _exact_json(value: Any) -> str | None:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = json.dumps(value)
        if json.loads(text) == value:
            return text
    return None


def _readable_json(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, default=_plain, skipkeys=True)
    except (ValueError, RecursionError):  # it holds itself
        return json.dumps({key: str(item) for key, item in value.items()}, skipkeys=True)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
