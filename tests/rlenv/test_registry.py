"""Ids go in, known, unknown, clashing, of packages and third parties; environments and messages come out."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv

import rlenv
from rlenv.bound import EngineBoundEnv
from rlenv.engine.scripted import ScriptedEngine
from rlenv.registry import register_own_tasks
from rlenv.tasks.math import MathEnv
from rlenv.vector import TextVectorEnv

Scripted = Callable[..., ScriptedEngine]


class Riddle(rlenv.TextEnv):
    def start(self, options: Mapping[str, Any]) -> str:
        return "What has keys and no doors?"

    def turn(self, action: str) -> rlenv.Turn:
        return rlenv.Turn(float("piano" in action))


class Stranger(gymnasium.Env[str, str]):
    """A text environment of somebody who does not know rlenv."""

    observation_space = gymnasium.spaces.Text(100, charset="abcdefghijklmnopqrstuvwxyz ")
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "say yes", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "thanks", np.float32(action == "yes"), np.True_, False, {}


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


@pytest.mark.parametrize("id", ["math-v0", "rlenv/math-v0", "rlenv:math-v0", "rlenv:rlenv/math-v0"])
def test_every_spelling_of_an_id_makes_the_same_task(id: str) -> None:
    env = rlenv.make(id)
    assert env.spec is not None and env.spec.id == "rlenv/math-v0"
    assert env.reset(seed=3) == rlenv.make("math-v0").reset(seed=3)


@pytest.mark.parametrize("id", ["rlenv/math-v0", "rlenv:math-v0", "rlenv:rlenv/math-v0"])
def test_gymnasium_alone_makes_our_tasks(id: str) -> None:
    assert gymnasium.make(id).reset(seed=3) == rlenv.make("math-v0").reset(seed=3)


@pytest.mark.parametrize("id", ["rlenv:math-v0", "rlenv:rlenv/math-v0"])
def test_a_spawned_worker_makes_our_tasks_by_a_qualified_id(id: str) -> None:
    envs = AsyncVectorEnv([lambda: gymnasium.make(id)] * 2, context="spawn", shared_memory=False)
    try:
        observations, _ = envs.reset(seed=3)
        assert observations == rlenv.make_vec("math-v0", 2).reset(seed=3)[0]
    finally:
        envs.close()


@pytest.mark.parametrize("wrong", ["math-v1", "maths-v0", "mathv0", "rlenv/mth-v0"])
def test_an_unknown_id_names_the_nearest(wrong: str) -> None:
    with pytest.raises(rlenv.UnknownTaskError, match="'math-v0'"):
        rlenv.make(wrong)
    with pytest.raises(rlenv.UnknownTaskError, match="'math-v0'"):
        rlenv.spec(wrong)
    with pytest.raises(rlenv.UnknownTaskError, match="'math-v0'"):
        rlenv.make_vec(["math-v0", wrong])


def test_an_id_like_no_other_lists_the_tasks() -> None:
    with pytest.raises(rlenv.UnknownTaskError, match="rlenv/math-v0, rlenv/math-retry-v0"):
        rlenv.make("qqqqqqqq")


def test_an_id_of_a_package_that_is_not_installed_says_so() -> None:
    with pytest.raises(rlenv.UnknownTaskError, match="no_such_package"):
        rlenv.make("no_such_package:task-v0")


def test_a_module_that_fails_to_import_fails_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_broken.py").write_text("import surely_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_there"):
        rlenv.make("half_broken:task-v0")


def test_list_names_our_tasks_and_those_registered() -> None:
    ours = ["rlenv/math-v0", "rlenv/math-retry-v0", "rlenv/word-problems-v0"]
    assert rlenv.list() == ours
    rlenv.register("acme/riddle-v0", Riddle)
    assert rlenv.list() == [*ours, "acme/riddle-v0"]


def test_a_registered_task_is_made_with_its_arguments() -> None:
    rlenv.register("riddle-v0", Riddle, kwargs={"max_turns": 2})
    assert rlenv.make("riddle-v0").unwrapped.max_turns == 2
    assert rlenv.make("riddle-v0", max_turns=3).unwrapped.max_turns == 3


def test_registering_the_same_task_again_is_quiet_and_takes_the_new_class() -> None:
    rlenv.register("riddle-v0", Riddle)
    again = type("Riddle", (Riddle,), {"__module__": __name__, "__qualname__": "Riddle"})  # a cell run twice
    rlenv.register("riddle-v0", again)
    assert type(rlenv.make("riddle-v0").unwrapped) is again


def test_a_clash_is_an_error_that_names_both_and_replaces_nothing() -> None:
    rlenv.register("riddle-v0", Riddle)
    with pytest.raises(rlenv.ConfigError, match=r"belongs to .*:Riddle: register .*:Stranger under another name"):
        rlenv.register("riddle-v0", Stranger)
    with pytest.raises(rlenv.ConfigError, match=r"belongs to rlenv\.tasks\.math:MathEnv"):
        rlenv.register("math-v0", Riddle)
    assert type(rlenv.make("riddle-v0").unwrapped) is Riddle
    assert type(rlenv.make("math-v0").unwrapped) is MathEnv


def test_a_malformed_id_is_refused() -> None:
    with pytest.raises(rlenv.ConfigError, match="a b/c d"):
        rlenv.register("a b/c d", Riddle)


def test_reloading_rlenv_is_quiet_and_changes_nothing() -> None:
    before = dict(gymnasium.registry)
    importlib.reload(rlenv)
    assert gymnasium.registry == before


def test_somebody_elses_plain_id_stays_theirs_with_one_report() -> None:
    code = """if True:
        import warnings, gymnasium
        class Theirs(gymnasium.Env):
            pass
        gymnasium.register("math-v0", Theirs)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import rlenv, importlib
            importlib.reload(rlenv)
        assert len(said) == 1 and "__main__:Theirs" in str(said[0].message), [str(s.message) for s in said]
        assert "'rlenv/math-v0'" in str(said[0].message)
        assert gymnasium.registry["math-v0"].entry_point is Theirs
        assert gymnasium.make("rlenv/math-v0").reset(seed=0)[0].startswith("What is")
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_installed_packages_add_tasks_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(
        "import rlenv\n"
        "class Riddle(rlenv.TextEnv):\n"
        "    def start(self, options):\n        return 'riddle'\n"
        "    def turn(self, action):\n        return rlenv.Turn(1.0)\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlenv.tasks]\nacme/riddle-v0 = acme:Riddle\nmath-v0 = acme:Riddle\n")
    code = """if True:
        import sys, warnings
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import rlenv
        assert "acme" not in sys.modules
        assert [str(s.message) for s in said if "acme:Riddle" in str(s.message)], said
        assert "acme/riddle-v0" in rlenv.list()
        assert rlenv.make("acme/riddle-v0").reset()[0] == "riddle"
        assert rlenv.make("math-v0").reset()[0].startswith("What is")
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": str(tmp_path)})


def test_a_strangers_text_environment_works_everywhere(scripted: Scripted) -> None:
    gymnasium.register("stranger-v0", Stranger)
    engine = scripted(lambda ids, sample: "yes")
    env = rlenv.make("stranger-v0", engine=engine)
    assert env.reset(seed=0) == ("say yes", {})
    observation, reward, terminated, truncated, info = env.step(rlenv.Sample())
    assert (observation, reward, terminated, truncated, info["completion"].text) == ("thanks", 1.0, True, False, "yes")
    assert type(reward) is float and type(terminated) is bool
    envs = rlenv.make_vec(["stranger-v0", "math-v0"], 4, engine=engine)
    envs.reset(seed=0)
    assert list(envs.step(rlenv.Sample())[1]) == [1.0, 0.0, 1.0, 0.0]


def test_our_task_comes_before_a_strangers_of_the_same_plain_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's own report that the plain id is taken over
        gymnasium.register("math-v0", Stranger)
    assert type(rlenv.make("math-v0").unwrapped) is MathEnv
    assert type(gymnasium.make("math-v0").unwrapped) is Stranger
    assert type(gymnasium.make("rlenv/math-v0").unwrapped) is MathEnv


def test_a_spec_survives_json_and_pickling_and_makes_the_same_environment() -> None:
    env = rlenv.make("math-v0", level=3, max_episode_steps=5)
    for spec in (EnvSpec.from_json(env.spec.to_json()), pickle.loads(pickle.dumps(env.spec))):
        again = rlenv.make(spec)
        assert again.spec == env.spec
        assert again.reset(seed=8) == env.reset(seed=8)
    assert json.loads(env.spec.to_json())["kwargs"] == {"level": 3}


def test_the_engine_never_enters_the_spec(scripted: Scripted) -> None:
    engine = scripted(lambda ids, sample: "x")
    env = rlenv.make("math-v0", engine=engine)
    assert isinstance(env, EngineBoundEnv)
    assert env.spec == rlenv.make("math-v0").spec
    assert rlenv.make_vec("math-v0", 2, engine=engine).spec == env.spec


def test_environments_that_were_made_are_closed_when_a_later_one_cannot_be(scripted: Scripted) -> None:
    closed: list[str] = []

    class Closing(Riddle):
        def close(self) -> None:
            closed.append("closed")

    rlenv.register("closing-v0", Closing)
    rlenv.register("wordless-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    engine = scripted(lambda ids, sample: "x")
    with pytest.raises(rlenv.ConfigError, match="Box"):
        rlenv.make_vec(["closing-v0", "closing-v0", "wordless-v0"], engine=engine)
    assert closed == ["closed", "closed"]


def test_a_system_message_needs_an_engine() -> None:
    with pytest.raises(rlenv.ConfigError, match="engine"):
        rlenv.make("math-v0", system="Be brief.")


def test_several_tasks_take_turns_in_one_vector() -> None:
    envs = rlenv.make_vec(["math-v0", "math-retry-v0"], 5)
    assert isinstance(envs, TextVectorEnv)
    assert [env.spec.id for env in envs.envs] == ["rlenv/math-v0", "rlenv/math-retry-v0"] * 2 + ["rlenv/math-v0"]
    assert envs.spec is None
    assert rlenv.make_vec(["math-v0", "math-retry-v0"]).num_envs == 2


@pytest.mark.parametrize(("ids", "count"), [("math-v0", 0), ([], None), ("math-v0", -1)])
def test_a_vector_of_nothing_is_refused(ids: Any, count: int | None) -> None:
    with pytest.raises(rlenv.ConfigError, match="at least one"):
        rlenv.make_vec(ids, count)


def test_a_broken_entry_point_is_reported_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [types.SimpleNamespace(name=name, value="acme:Riddle") for name in ("a b/c", "acme/other-v0")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    with pytest.warns(UserWarning, match="a b/c"):
        register_own_tasks()
    assert "acme/other-v0" in rlenv.list()
