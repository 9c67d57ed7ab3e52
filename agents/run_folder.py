"""What a run leaves behind goes in, one readable folder comes out, at whatever moment the run ends.

    runs/NAME/
      config.toml     what was asked for                     written once, first
      metrics.jsonl   one line an optimizer step             flushed line by line
      summary.json    figures so far, and `status`           replaced whole after each step
      curves.png      reward, length, staleness, mismatch    replaced whole
      trajectories/   rollouts in parquet, if asked for      each part renamed into place when complete
      model/          the trained model, for transformers    the learner renames it into place when complete
      error.txt       traceback of a run that failed

`status` is "starting", "running", "done", "interrupted" or "failed". Whatever is replaced is written beside its
final name, flushed to disk and renamed, so that a reader, or a run that was killed, never sees half a file.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlenv.errors import ConfigError


class RunFolder:
    """The folder of one run. An earlier run under this name is moved to NAME.1, NAME.2, … first."""

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        self.path = Path(path)
        _make_way(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.toml", to_toml(config).encode())
        self._metrics = open(self.metrics, "a", encoding="utf-8")  # noqa: SIM115

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def error(self) -> Path:
        return self.path / "error.txt"

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one line; it can be read as soon as this returns."""
        self._metrics.write(_json(row) + "\n")
        self._metrics.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.path / "summary.json", (_json(summary, indent=2) + "\n").encode())

    def write_error(self, traceback: str) -> None:
        write_atomically(self.error, traceback.encode())

    def close(self) -> None:
        self._metrics.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines of a `metrics.jsonl`; a last line without its newline is still being written."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, flush to disk, rename. A full disk leaves the former file as it was."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat TOML of strings, numbers and booleans. A value of None is left out, as TOML has no word for it."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
    text = "\n".join(lines) + "\n"
    assert tomllib.loads(text) == {key: value for key, value in values.items() if value is not None}
    return text


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")  # TOML strings are JSON strings, but for this character
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _json(value: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; both become null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _make_way(path: Path) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} holds something that is not a run: type --run-dir with a new folder")
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
