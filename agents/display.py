"""Progress goes in; a person sees it: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlenv.agents.tally import StepRow

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 60  # steps drawn in a sparkline


class Display(Protocol):
    """What a run tells a person. Used as a context manager, so that the terminal is always given back."""

    def phase(self, text: str) -> None:
        """Something that takes a while begins, or a result is known."""

    def step(self, row: StepRow) -> None:
        """One optimizer step is over and its weights serve."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display_for(steps: int, stream: IO[str] | None = None) -> Display:
    """A live display if `stream` (standard output) is a terminal, lines otherwise."""
    console = Console(file=stream or sys.stdout)
    return LiveDisplay(steps, console) if console.is_terminal else LineDisplay(steps, console.file)


class LineDisplay:
    """One line a phase and a step, flushed at once."""

    def __init__(self, steps: int, stream: IO[str] | None = None) -> None:
        self._steps, self._stream = steps, stream or sys.stdout

    def phase(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def step(self, row: StepRow) -> None:
        figures = "  ".join(f"{name} {value}" for name, value in figures_of(row))
        print(f"step {row.step}/{self._steps}  {figures}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay:
    """A table that is redrawn in place; phases scroll by above it."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._rows = steps, list[StepRow]()
        self._live = Live(
            console=console,
            refresh_per_second=8,
            get_renderable=self._render,
            redirect_stdout=False,  # what libraries print is no part of the display
            redirect_stderr=False,
        )

    def phase(self, text: str) -> None:
        self._live.console.print(Text(text, style="bold"))

    def step(self, row: StepRow) -> None:
        self._rows.append(row)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        if not self._rows:
            return Text("")
        row = self._rows[-1]
        table = Table.grid(padding=(0, 2))
        for name, value in figures_of(row):
            table.add_row(Text(name, style="dim"), value, self._curve(name))
        head = Table.grid(padding=(0, 2))  # a bar of its own would not end its line
        bar = ProgressBar(total=self._steps, completed=row.step, width=40)
        head.add_row(f"step {row.step}/{self._steps}", bar, f"{row.wall_s:.0f} s")
        return Group(head, table)

    def _curve(self, name: str) -> Text:
        curves = {"reward": [row.reward for row in self._rows], "length": [row.length for row in self._rows]}
        return Text(sparkline(curves.get(name, ())), style="green")


def figures_of(row: StepRow) -> list[tuple[str, str]]:
    """What a person wants to follow, in the order in which it is shown."""
    figures = [
        ("reward", f"{row.reward:.3f}"),
        ("length", f"{row.length:.1f}"),
        ("staleness", f"{row.staleness_mean:.2f} (max {row.staleness_max})"),
        ("tokens/s", f"{row.tokens_per_s:.0f}"),
        ("mismatch", f"{row.mismatch_max:.1e}"),
        ("stall", f"{row.stall_s * 1e3:.0f} ms"),
    ]
    if row.failures:
        figures.append(("failures", ", ".join(f"{cause} {count}" for cause, count in row.failures.items())))
    if row.dropped:
        figures.append(("dropped", ", ".join(f"{cause} {count}" for cause, count in row.dropped.items())))
    return figures


def sparkline(values: Sequence[float]) -> str:
    """The last values as a line of blocks, from their least to their greatest."""
    values = values[-HISTORY:]
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)
