"""What a person sees: lines without a terminal, a table on one, one picture at the end."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

from rich.console import Console

from rlenv.agents.curves import draw_curves
from rlenv.agents.display import LineDisplay, LiveDisplay, display_for, sparkline
from rlenv.agents.tally import StepRow

ROW = StepRow(
    step=3,
    wall_s=4.0,
    reward=0.625,
    length=12.5,
    staleness_mean=0.75,
    staleness_max=2,
    constant_groups=1,
    mismatch_mean=1e-6,
    mismatch_max=2e-5,
    in_flight=40,
    tokens_per_s=1234.0,
    failures={"timeout": 2},
    dropped={"stale": 1},
    wait_s=0.5,
    learn_s=0.5,
    update_s=0.2,
    stall_s=0.05,
    learner={"loss": 0.1},
)
SHOWN = ("3/10", "0.625", "12.5", "max 2", "1234", "2.0e-05", "50 ms", "timeout 2", "stale 1")


def test_without_a_terminal_each_step_is_one_line() -> None:
    stream = io.StringIO()
    with display_for(10, stream) as display:
        assert isinstance(display, LineDisplay)
        display.phase("starting")
        display.step(ROW)
    first, second = stream.getvalue().splitlines()
    assert first == "starting" and all(figure in second for figure in SHOWN)


def test_on_a_terminal_the_same_figures_stand_in_a_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveDisplay(10, console) as display:
        display.phase("starting")
        display.step(ROW)
    shown = console.file.getvalue()
    assert "starting" in shown and all(figure in shown for figure in SHOWN)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert any(line.startswith("step 3/10") and line.rstrip().endswith("4 s") for line in lines)
    assert any(line.startswith("reward") for line in lines)


def test_sparkline_spans_the_values() -> None:
    assert sparkline([0, 1]) == "▁█" and sparkline([3, 3]) == "▁▁" and sparkline([]) == ""


def test_curves_are_drawn_from_what_the_run_folder_holds(tmp_path: Path) -> None:
    rows = [json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(ROW, step=i)))) for i in (1, 2, 3)]
    summary = {"task": "math-v0", "updates": 3, "mode": "async", "staleness_bound": 2, "eval_before": 0.4}
    draw_curves(rows, summary, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_cut_before_its_first_step_has_a_picture_too(tmp_path: Path) -> None:
    draw_curves([], {"task": "math-v0"}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
