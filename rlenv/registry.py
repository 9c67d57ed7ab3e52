"""A task id goes in, a made environment or vector of them comes out, bound to a rollout engine if one is given.

Built on Gymnasium's registry: `gymnasium.make("rlenv/math-v0")` knows our tasks, and `rlenv.make` knows whatever
anybody registered with Gymnasium. Our ids live in the namespace `rlenv/`, which may be left out: a plain id
means ours first, then a third party's. Other packages add tasks without importing us, by an entry point:

    [project.entry-points."rlenv.tasks"]
    "acme/riddle-v0" = "acme.riddle:RiddleEnv"
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AutoresetMode

from rlenv.bound import EngineBoundEnv
from rlenv.engine.base import Engine
from rlenv.errors import ConfigError, UnknownTaskError
from rlenv.isolated import IsolatedEnv
from rlenv.limit import make_env
from rlenv.render import Renderer
from rlenv.vector import TextVectorEnv

NAMESPACE = "rlenv"
ENTRY_POINT_GROUP = "rlenv.tasks"
_OWN_TASKS = {
    "math-v0": "rlenv.tasks.math:MathEnv",
    "math-retry-v0": "rlenv.tasks.math_retry:MathRetryEnv",
    "word-problems-v0": "rlenv.tasks.word_problems:WordProblemsEnv",
}
_listed: dict[str, None] = {}  # ids in the order in which they were registered through this module
_reported: set[str] = set()  # clashes that a warning told of already

EnvCreator = Callable[..., gymnasium.Env[str, str]]


def make(
    id: str | EnvSpec,
    *,
    engine: Engine | None = None,
    system: str | None = None,
    step_timeout_s: float | None = None,
    **kwargs: Any,
) -> gymnasium.Env[str, Any]:
    """One environment, by id (`"math-v0"`, `"rlenv/math-v0"`, `"package:task-v0"`) or by spec.

    With an engine its actions are `str | Sample`; `system` then opens every transcript with a system message.
    With `step_timeout_s` the environment runs in a process of its own, which is ended when a step takes longer.
    Other arguments are `gymnasium.make`'s and the task's own; an episode that is over on the last of
    `max_episode_steps` is terminated, and not truncated as well. Raises UnknownTaskError for an id that nobody
    registered, ConfigError for arguments that cannot work.
    """
    if system is not None and engine is None:
        raise ConfigError("a system message is for an engine's transcript: give engine=..., too")
    with contextlib.ExitStack() as on_error:
        env = _create(_resolve(id), step_timeout_s, kwargs)
        on_error.callback(env.close)
        made = env if engine is None else EngineBoundEnv(env, engine, system=system)
        on_error.pop_all()
    return made


def make_vec(
    id: str | EnvSpec | Sequence[str | EnvSpec],
    num_envs: int | None = None,
    *,
    engine: Engine | None = None,
    system: str | None = None,
    step_timeout_s: float | None = None,
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    **kwargs: Any,
) -> TextVectorEnv:
    """`num_envs` environments (by default one per id) whose steps are one batch; several ids take turns.

    A slot that exceeds `step_timeout_s` is truncated, with the cause in `infos["failure"]`, and holds up no other.
    Raises what `make` raises.
    """
    ids = [id] if isinstance(id, str | EnvSpec) else [*id]
    count = len(ids) if num_envs is None else num_envs
    if not ids or count < 1:
        raise ConfigError(f"{count} environments of {len(ids)} tasks: give at least one of each")
    specs = [_resolve(one) for one in ids]
    renderer = None if engine is None else Renderer(engine.tokenizer)
    envs: list[gymnasium.Env[str, Any]] = []
    with contextlib.ExitStack() as on_error:
        for slot in range(count):
            env = _create(specs[slot % len(specs)], step_timeout_s, kwargs)
            on_error.callback(env.close)
            envs.append(env if engine is None else EngineBoundEnv(env, engine, system=system, renderer=renderer))
        on_error.pop_all()
    return TextVectorEnv(envs, autoreset_mode=autoreset_mode)


def register(id: str, entry_point: str | EnvCreator, **spec: Any) -> None:
    """Register a task with Gymnasium; `spec` holds `gymnasium.register`'s other arguments.

    Registering the same entry point again is quiet. Raises ConfigError when the id is somebody else's.
    """
    try:
        new = EnvSpec(id, entry_point=entry_point, **spec)
    except (GymnasiumError, TypeError) as error:
        raise ConfigError(f"cannot register {id!r}: {error}") from error
    owner = gymnasium.registry.get(new.id)
    if owner is not None and _author(owner) != _author(new):
        raise ConfigError(
            f"the id {id!r} already belongs to {_author(owner)}: register {_author(new)} under another name, "
            f"a namespace ('mine/{new.name}-v0') or a higher version"
        )
    gymnasium.registry.pop(new.id, None)
    gymnasium.register(id, entry_point, **spec)
    _listed[new.id] = None


def spec(id: str) -> EnvSpec:
    """The JSON-able spec of a task. Raises UnknownTaskError."""
    return _resolve(id)


def list_tasks() -> list[str]:
    """The ids of our own tasks, those of installed packages and those registered with `register`."""
    return [id for id in _listed if id in gymnasium.registry]


def register_own_tasks() -> None:
    """Register our tasks and the entry points of installed packages; calling it again changes nothing.

    An id that somebody else holds already stays theirs, with one warning.
    """
    for name, entry_point in _OWN_TASKS.items():
        _register_or_warn(f"{NAMESPACE}/{name}", entry_point)
        _alias(name)
    for found in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        _register_or_warn(found.name, found.value)


def _create(spec: EnvSpec, step_timeout_s: float | None, kwargs: dict[str, Any]) -> gymnasium.Env[str, Any]:
    if step_timeout_s is None:
        return make_env(spec, **kwargs)
    return IsolatedEnv(spec, kwargs, timeout_s=step_timeout_s)


def _register_or_warn(id: str, entry_point: str) -> None:
    try:
        register(id, entry_point)
    except ConfigError as error:
        _report(str(error))


def _alias(name: str) -> None:
    """Let `rlenv:math-v0`, too, name our task wherever Gymnasium alone looks it up (in a spawned worker)."""
    own = gymnasium.registry[f"{NAMESPACE}/{name}"]
    holder = gymnasium.registry.setdefault(name, own)
    if _author(holder) != _author(own):
        _report(
            f"gymnasium.make({name!r}) stays {_author(holder)}, which was registered first; "
            f"rlenv's task of that name is '{own.id}'"
        )


def _report(clash: str) -> None:
    if clash not in _reported:
        _reported.add(clash)
        warnings.warn(clash, stacklevel=5)  # at the import of rlenv


def _resolve(id: str | EnvSpec) -> EnvSpec:
    if isinstance(id, EnvSpec):
        return id
    module, _, name = id.rpartition(":")
    if module:
        _import_for(id, module)
    for candidate in (f"{NAMESPACE}/{name}", name):
        if candidate in gymnasium.registry:
            return gymnasium.registry[candidate]
    raise UnknownTaskError(f"no task {id!r}. {_nearest(name)}")


def _import_for(id: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UnknownTaskError(f"no module {module!r} to import for the task {id!r}: install it first") from error


def _nearest(name: str) -> str:
    known = {name: None for id in (*_listed, *gymnasium.registry) for name in (id.removeprefix(f"{NAMESPACE}/"),)}
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    return f"rlenv.list() names the tasks there are: {', '.join(list_tasks())}"


def _author(spec: EnvSpec) -> str:
    """Who made it: the entry point's name, which a reload of its module does not change."""
    point = spec.entry_point
    if point is None or isinstance(point, str):
        return str(point)
    return f"{getattr(point, '__module__', '?')}:{getattr(point, '__qualname__', repr(point))}"
