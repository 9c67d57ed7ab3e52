"""Setting up: one line says what is missing before anything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

FILL = Path(__file__).parents[1] / ".ci" / "fill-venv"


def fill(
    folder: Path, python: str = "", stand_ins: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run fill-venv in `folder`, where `stand_ins` (name → shell script) hide commands of the machine."""
    bin = folder / "bin"
    bin.mkdir()
    for name, script in (stand_ins or {}).items():
        (bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
    command = ["bash", str(FILL), "cpu,dev", python]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_a_python_that_will_not_do_is_refused(tmp_path: Path, python: str) -> None:
    end = fill(tmp_path, python)
    assert end.returncode == 1 and end.stderr.count("\n") == 1
    assert "3.11 or 3.12" in end.stderr and python in end.stderr and "PYTHON=" in end.stderr


def test_a_machine_without_a_python_that_will_do_is_told_which_to_install(tmp_path: Path) -> None:
    end = fill(tmp_path, stand_ins=dict.fromkeys(("python3.11", "python3.12", "python3", "python"), "exit 1"))
    assert end.returncode == 1 and end.stderr.count("\n") == 1 and "none was found" in end.stderr


def test_a_full_disk_is_noticed_before_the_install(tmp_path: Path) -> None:
    end = fill(tmp_path, sys.executable, {"df": "echo head; echo disk 100000000 90000000 1048576 90% /"})
    assert end.returncode == 1 and "1 GiB are left" in end.stderr
    assert not (tmp_path / ".venv").exists()
