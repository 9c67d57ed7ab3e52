"""`rlenv replay`: a recorded rollout goes in, a transcript and whether it agrees come out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import rlenv
from rlenv.agents.cli import main
from rlenv.agents.transcript import show_replay, transcript
from rlenv.trajectories import write_trajectories
from rlenv.types import Failure, Group, Message, Sample, Trajectory, VersionSpan


def recorded(answer: str, reward: float, **changes: object) -> Trajectory:
    """An episode of math-v0 at seed 0, answered by `answer`, of which some is sampled by newer weights."""
    env = rlenv.make("math-v0")
    prompt, _ = env.reset(seed=0)
    said: tuple[Message, ...] = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    own = {"turn_rewards": (reward,), "samples": (Sample(temperature=0.5, top_k=9),), "sample_seed": 3}
    return Trajectory(
        task="rlenv/math-v0",
        seed=0,
        token_ids=(1, 2, 3, 4),
        loss_mask=(False, True, True, True),
        logprobs=(0.0, -1.0, -1.0, -4.0),
        spans=(VersionSpan("3", 1, 2), VersionSpan("4#2", 2, 4)),
        messages=said,
        reward=reward,
        terminated=True,
        truncated=False,
        turns=1,
        info={**own, "rewards": {"answer": reward}, "options": {}, "spec": env.spec},
    )


def failure(cause: str) -> Failure:
    row = recorded("\\boxed{1}", 0.0)
    info = {**row.info, "turn_rewards": (), "rewards": {}}
    return Failure(row.task, 0, cause, "it was [bold]slow[/bold]", row.messages, info)


def shown(rollout: Trajectory | Failure) -> str:
    output = io.StringIO()
    Console(file=output, width=100).print(transcript(rollout, 7))
    return output.getvalue()


def test_a_transcript_tells_who_said_what_how_it_was_sampled_and_what_it_earned() -> None:
    text = shown(recorded("it is \\boxed{5}", 0.25))
    for part in (
        "rlenv/math-v0 · group 7 · seed 0 · sample seed 3", "user", "What is", "assistant", "it is \\boxed{5}",
        "temperature 0.5, top-k 9", "3 ids at weights 3 → 4#2, mean log-prob -2.000", "reward 0.25 (answer 0.25)",
        "terminated after 1 turns",
    ):  # fmt: skip
        assert part in text


def test_what_was_said_is_shown_as_it_is_and_never_obeyed() -> None:
    text = shown(recorded("[red]x[/red] [/] \x1b[2J\x07 :smile: \u202e", 0.0))
    assert "[red]x[/red] [/] \\x1b[2J\\x07 :smile: \\x202e" in text
    assert "no reward: timeout: it was [bold]slow[/bold]" in shown(failure("timeout"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder of three rollouts: one as it was graded, one with a reward that nobody gave, and a failure."""
    (tmp_path / "trajectories").mkdir()
    honest, forged = recorded("\\boxed{-1}", 0.0), recorded("\\boxed{-1}", 1.0)
    for row in (honest, forged):
        row.info["rewards"].clear()
    group = Group(0, honest.task, 0, (honest, forged), (failure("timeout"),))
    write_trajectories(tmp_path / "trajectories" / "00000.parquet", [group])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 0, "replay agrees"),
        (["--index", "1"], 1, "were [1.0], and are [0.0]"),
        (["--index", "2"], 1, "it ended by timeout, and ends by a reward"),
        (["--failures"], 1, "it ended by timeout"),
    ],
)
def test_a_replay_agrees_or_differs(
    folder: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(folder), *arguments]) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["{}", "--index", "3"], "no rollout number 3"),
        (["{}", "--failures", "--index", "1"], "no failed rollout number 1"),
        (["{}", "--index", "-1"], "--index 0"),
        (["{}/nothing"], "--save-trajectories"),
    ],
)
def test_what_is_not_there_is_answered_in_one_line(
    folder: Path, arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(argument.format(folder) for argument in arguments)]) == 2
    errors = capsys.readouterr().err
    assert advice in errors and errors.count("\n") == 1


def test_a_single_file_may_be_named(folder: Path) -> None:
    console = Console(file=io.StringIO())
    assert show_replay(str(folder / "trajectories" / "00000.parquet"), 0, failures=False, console=console) == 0
