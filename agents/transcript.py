"""A recorded rollout goes in, a transcript for people comes out: `rlenv replay FILE`.

What a model or an environment said is shown as it is: no markup is read in it, and control characters are spelt out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from rlenv.errors import ConfigError
from rlenv.replay import replay
from rlenv.trajectories import read_trajectories, rollouts_of
from rlenv.types import Failure, Sample, Trajectory

STYLES = {"assistant": "green", "system": "magenta"}


def show_replay(file: str, index: int, *, failures: bool, console: Console) -> int:
    """Print rollout `index` and whether its replay agrees: status 0 if so, else 1. Raises ConfigError without one."""
    if index < 0:
        raise ConfigError(f"index is {index}: type --index 0 or more")
    chosen = next(itertools.islice(_rollouts(file, failures), index, None), None)
    if chosen is None:
        what = "failed rollout" if failures else "rollout"
        raise ConfigError(f"no {what} number {index} in {file}: type a smaller --index")
    group, rollout = chosen
    console.print(transcript(rollout, group))
    differences = replay(rollout)
    for difference in differences:
        console.print(Text(f"replay differs: {_visible(difference)}", style="bold red"))
    if not differences:
        console.print(Text("replay agrees: the same observations, rewards and end", style="bold green"))
    return 1 if differences else 0


def transcript(rollout: Trajectory | Failure, group: int) -> RenderableType:
    """Who said what, at which weights and likelihood, and what it earned."""
    sample_seed = rollout.info.get("sample_seed")
    head = f"{rollout.task} · group {group} · seed {rollout.seed} · sample seed {sample_seed}"
    notes = _turn_notes(rollout)
    panels = []
    for message in rollout.messages:
        role = message["role"]
        note = next(notes, "") if role == "assistant" else ""
        text = Text(_visible(message["content"]))
        style = STYLES.get(role, "cyan")
        panels.append(Panel(text, title=Text(role), subtitle=Text(note), title_align="left", border_style=style))
    return Group(Text(head, style="bold"), *panels, Text(_ending(rollout), style="bold"))


def _rollouts(file: str, failures: bool) -> Iterator[tuple[int, Trajectory | Failure]]:
    for group in read_trajectories(file):
        for rollout in group.failures if failures else rollouts_of(group):
            yield group.id, rollout


def _turn_notes(rollout: Trajectory | Failure) -> Iterator[str]:
    """One line for each answer: how it was sampled, the weights that did it, and its mean log-prob."""
    samples, rewards = rollout.info.get("samples", ()), rollout.info.get("turn_rewards", ())
    sampled = [*_sampled_runs(rollout)] if isinstance(rollout, Trajectory) else []
    for sample, turn, reward in itertools.zip_longest(samples, sampled, rewards):
        parts = [_manner(sample)] if sample else []
        parts += [turn] if turn else []
        parts += [f"reward {reward:g}"] if reward is not None else []
        yield " · ".join(parts)


def _sampled_runs(row: Trajectory) -> Iterator[str]:
    begin = 0
    for is_sampled, run in itertools.groupby(row.loss_mask):
        end = begin + len([*run])
        if is_sampled:
            labels = dict.fromkeys(span.label for span in row.spans if begin <= span.start < end)
            mean = sum(row.logprobs[begin:end]) / (end - begin)
            yield f"{end - begin} ids at weights {' → '.join(labels)}, mean log-prob {mean:.3f}"
        begin = end


def _manner(sample: Sample) -> str:
    cut = f", top-p {sample.top_p:g}" * (sample.top_p < 1) + f", top-k {sample.top_k}" * (sample.top_k > 0)
    return f"temperature {sample.temperature:g}{cut}"


def _ending(rollout: Trajectory | Failure) -> str:
    if isinstance(rollout, Failure):
        return f"no reward: {rollout.cause}: {_visible(rollout.message)}"
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.info.get("rewards", {}).items())
    end = "terminated" if rollout.terminated else f"truncated by {rollout.info.get('truncated_by', 'the environment')}"
    return f"reward {rollout.reward:g}{f' ({parts})' if parts else ''} · {end} after {rollout.turns} turns"


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)
