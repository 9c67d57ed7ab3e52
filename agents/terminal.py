"""A process whose libraries print goes in; a terminal that only we write to, and a log of all the rest, come out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Terminal:
    """Copies of this process's standard output and error, which stay what they were when those are redirected."""

    out: IO[str]
    err: IO[str]

    @classmethod
    def copied(cls) -> Self:
        return cls(*(os.fdopen(os.dup(descriptor), "w", buffering=1) for descriptor in (STDOUT, STDERR)))


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send what this process, its libraries and the processes they start print to `log`, appended."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (STDOUT, STDERR)}
    with open(log, "ab") as file:
        for descriptor in saved:
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, former in saved.items():
            os.dup2(former, descriptor)
            os.close(former)
