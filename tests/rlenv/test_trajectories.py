"""Groups go into parquet files; the same groups, the same bytes, and rows that `datasets` reads, come out."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from episodes import Abstaining, Echo, Sampler, play_group
from gymnasium.envs.registration import EnvSpec

import rlenv
from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.trajectories import (
    ROWS_AT_ONCE,
    TrajectoryFolder,
    portable_spec,
    read_trajectories,
    rollouts_of,
    write_trajectories,
)
from rlenv.types import Failure, Group, Sample, Trajectory, VersionSpan

Scripted = Callable[..., ScriptedEngine]

SPEC = EnvSpec("mine/x-v0", entry_point="mine:X", kwargs={"level": 3}, max_episode_steps=4)
ASKED = Sample(temperature=0.7, top_p=0.9, top_k=20, max_tokens=64, stop=("</answer>", "\n"), seed=2**63 - 1)


def finished(seed: int = 5, ids: int = 4, **info: Any) -> Trajectory:
    own = {"rewards": {}, "turn_rewards": (1.0,), "samples": (ASKED,), "sample_seed": 7, "options": {}, "spec": SPEC}
    return Trajectory(
        task="mine/x-v0",
        seed=seed,
        token_ids=(*range(ids),),
        loss_mask=(False,) + (True,) * (ids - 1),
        logprobs=(0.0,) + (-1 / 3,) * (ids - 1),
        spans=(VersionSpan("4", 1, 2), VersionSpan("5#2", 2, ids, stale_context=True)),
        messages=({"role": "user", "content": "größer? 🙂"}, {"role": "assistant", "content": "\x00\x1b[31m"}),
        reward=1.0,
        terminated=True,
        truncated=False,
        turns=1,
        info={**own, **info},
    )


def failed(cause: str = "timeout") -> Failure:
    info = {
        "rewards": {},
        "turn_rewards": (),
        "samples": (),
        "sample_seed": None,
        "options": {"index": 3},
        "spec": SPEC,
    }
    return Failure("mine/x-v0", 5, cause, "it took too long", ({"role": "user", "content": "?"},), info)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    groups = [
        Group(0, "mine/x-v0", 5, (finished(), finished(rewards={"answer": 1.0, "format": 0.25})), (failed(),)),
        Group(1, "mine/x-v0", 5, (), (failed("abstained"), failed("ValueError"))),
        Group(2, "mine/x-v0", 6, (finished(6, solved=True, why="said so", nested={"a": [1, None, 2.5]}),)),
    ]
    write_trajectories(tmp_path / "some.parquet", groups)
    assert [*read_trajectories(tmp_path / "some.parquet")] == groups
    assert [*read_trajectories(tmp_path)] == groups


def test_datasets_reads_the_columns_by_name_and_type(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "some.parquet", [Group(3, "mine/x-v0", 5, (finished(),), (failed(),))])
    table = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    row, failure = table[0], table[1]
    assert row["token_ids"] == [0, 1, 2, 3] and row["loss_mask"] == [False, True, True, True]
    assert row["logprobs"] == [0.0, -1 / 3, -1 / 3, -1 / 3]
    assert row["spans"][1] == {"label": "5#2", "start": 2, "end": 4, "stale_context": True}
    assert (row["task"], row["seed"], row["sample_seed"], row["group"]) == ("mine/x-v0", 5, 7, 3)
    assert row["samples"][0]["temperature"] == 0.7 and row["samples"][0]["stop"] == ["</answer>", "\n"]
    assert (row["reward"], row["cause"]) == (1.0, None)
    assert (failure["reward"], failure["cause"], failure["message"]) == (None, "timeout", "it took too long")
    assert json.loads(row["spec"])["kwargs"] == {"level": 3}


def test_infos_of_any_kind_are_written_so_that_people_can_read_them(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    odd = {"array": np.arange(3), "number": np.float32(0.5), "object": {1, 2}.__class__, ("a", 1): 0, "half": "\ud83d"}
    write_trajectories(tmp_path / "a.parquet", [Group(0, "t", 5, (finished(**{"x": 1} | {"odd": odd}),))])
    write_trajectories(tmp_path / "b.parquet", [Group(1, "t", 5, (finished(endless=endless, nan=float("nan")),))])
    first, second = (group.trajectories[0].info for group in read_trajectories(tmp_path))
    assert first["odd"]["array"] == [0, 1, 2] and first["odd"]["number"] == 0.5 and "set" in first["odd"]["object"]
    assert "self" in second["endless"]


def test_half_a_character_does_not_end_a_run(tmp_path: Path) -> None:
    said = Failure("t", 0, "ValueError", "bad \ud83d", ({"role": "user", "content": "\udc00!"},))
    write_trajectories(tmp_path / "a.parquet", [Group(0, "t", 0, (), (said,))])
    (group,) = read_trajectories(tmp_path)
    assert group.failures[0].message == "bad \\ud83d" and group.failures[0].messages[0]["content"] == "\\udc00!"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    write_trajectories(path, [Group(0, "t", 5, (finished(),))])
    before = path.read_bytes()

    def breaks() -> Any:
        yield Group(1, "t", 5, (finished(),) * ROWS_AT_ONCE)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_trajectories(path, breaks())
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_row_groups_are_bounded_by_rows_and_by_ids(tmp_path: Path) -> None:
    def sizes(groups: list[Group]) -> list[int]:
        write_trajectories(tmp_path / "a.parquet", groups)
        meta = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata
        return [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]

    short = [Group(id, "t", 5, (finished(),) * 8) for id in range(130)]
    assert sizes(short) == [512, 512, 16]
    assert [group.id for group in read_trajectories(tmp_path)] == [*range(130)]
    long = [Group(id, "t", 5, (finished(ids=400_000),)) for id in range(4)]
    assert sizes(long) == [3, 1]


def test_a_folder_can_be_read_while_it_grows_and_after_it_is_closed(tmp_path: Path) -> None:
    folder = TrajectoryFolder(tmp_path / "kept")
    for id in range(70):
        folder.add(Group(id, "t", 5, (finished(),) * 8))
    assert [group.id for group in read_trajectories(tmp_path / "kept")] == [*range(64)]
    folder.close()
    folder.close()
    assert [group.id for group in read_trajectories(tmp_path / "kept")] == [*range(70)]


def test_threads_may_add_at_once(tmp_path: Path) -> None:
    folder = TrajectoryFolder(tmp_path / "kept")

    def add(first: int) -> None:
        for id in range(first, first + 30):
            folder.add(Group(id, "t", 5, (finished(),) * 16))

    threads = [threading.Thread(target=add, args=(number * 30,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder.close()
    assert sorted(group.id for group in read_trajectories(tmp_path / "kept")) == [*range(120)]


def test_what_is_no_file_of_trajectories_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    datasets.Dataset.from_dict({"a": [1]}).to_parquet(str(tmp_path / "other.parquet"))
    (tmp_path / "empty").mkdir()
    for name, why in (
        ("text.parquet", "no parquet"),
        ("other.parquet", "other columns"),
        ("empty", "no traj"),
        ("missing", "no trajectories in"),
    ):
        with pytest.raises(rlenv.ConfigError, match=why):
            [*read_trajectories(tmp_path / name)]


class Local(rlenv.TextEnv):
    def start(self, options: Mapping[str, Any]) -> str:
        return "?"

    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn()


def test_a_spec_is_kept_if_the_task_can_be_made_again_from_it() -> None:
    def closure() -> Local:
        return Local()

    assert json.loads(portable_spec(EnvSpec("a/b-v0", Local)) or "")["entry_point"] == f"{__name__}:Local"
    assert portable_spec(EnvSpec("a/b-v0", closure)) is None
    assert portable_spec(EnvSpec("a/b-v0", "a:B", kwargs={"data": object()})) is None
    assert portable_spec(None) is None


def played(scripted: Scripted, env: Callable[[], Any], **options: Any) -> Group:
    counts = itertools.count()
    engine = scripted(lambda prompt, sample: f"answer {(sample.seed or next(counts)) % 1000}")
    return play_group(lambda: EngineBoundEnv(env(), engine), Sampler(ASKED.__class__(temperature=0.5)), **options)


def test_one_seed_gives_the_same_bytes_and_another_gives_others(scripted: Scripted, tmp_path: Path) -> None:
    for name, run_seed in (("a", 1), ("b", 1), ("c", 2)):
        group = played(scripted, lambda: Echo("go on", "done"), run_seed=run_seed)
        write_trajectories(tmp_path / name, [group])
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("task", ["math-v0", "math-retry-v0"])
def test_the_recorded_ids_played_again_give_a_byte_identical_file(
    scripted: Scripted, tmp_path: Path, task: str
) -> None:
    """What each turn sampled is looked up by its seed, so that the second engine says what the first one did."""
    said: dict[int, tuple[int, ...]] = {}
    draws = np.random.default_rng(0)

    def first(prompt: tuple[int, ...], sample: Sample) -> list[int]:
        text = f"\\boxed{{{draws.integers(200)}}}"
        said[sample.seed or 0] = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
        return [*said[sample.seed or 0]]

    for name, policy in (("first", first), ("again", lambda prompt, sample: [*said[sample.seed]])):
        engine = scripted(policy)
        group = play_group(lambda engine=engine: rlenv.make(task, engine=engine), seed=11, id=3)
        write_trajectories(tmp_path / name, [group])
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()


def test_rollouts_record_what_makes_them_again(scripted: Scripted) -> None:
    engine = scripted(lambda prompt, sample: "\\boxed{1}")
    make = lambda: rlenv.make("math-v0", engine=engine, level=1)  # noqa: E731
    (first, *_) = rollouts_of(play_group(make, options={"index": 3}))
    assert first.info["options"] == {"index": 3} and first.info["spec"].kwargs == {"level": 1}
    assert first.info["turn_rewards"] == (first.reward,)


class Scored(Echo):
    def turn(self, action: str) -> rlenv.Turn:
        turn = super().turn(action)
        return rlenv.Turn({"answer": 1.0, "format": 0.25 * (self.turns or 0)}, turn.observation, turn.terminated)


def test_named_rewards_of_all_turns_add_up_to_the_reward(scripted: Scripted) -> None:
    group = played(scripted, lambda: Scored("go on", "done"))
    for row in group.trajectories:
        assert row.info["rewards"] == {"answer": 2.0, "format": 0.75} and row.reward == 2.75
        assert row.info["turn_rewards"] == (1.25, 1.5)


def test_a_failure_keeps_the_transcript_up_to_the_answer_it_failed_on(scripted: Scripted) -> None:
    group = played(scripted, lambda: Abstaining("x"))
    assert len(group.failures) == 4
    for failure in group.failures:
        assert [message["role"] for message in failure.messages] == ["user", "assistant"]
        assert failure.messages[1]["content"].startswith("answer")
