"""An engine in an actor of Ray that dies is an error at once, and comes back with the weights that it is to serve."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rlenv.agents.learner_types import LearnerConfig
from rlenv.errors import ConfigError, EngineDeadError
from rlenv.models import default_model
from rlenv.types import Sample

if TYPE_CHECKING:
    from conftest import EngineCase

LONG = Sample(max_tokens=200, ignore_eos=True)


def test_ray_is_to_be_started_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from rlenv.engine.ray import RayEngine

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"call ray\.init\(\) first"):
        RayEngine(default_model())


@pytest.mark.engine
def test_setting_that_cannot_work_is_told_from_the_actor(ray_case: EngineCase) -> None:
    from rlenv.engine.ray import RayEngine

    with pytest.raises(ConfigError, match="leave it out on a CPU"):
        RayEngine(default_model(), actor={"num_cpus": 0}, device="cpu", batch_invariant=True)


@pytest.mark.engine
def test_actor_that_ray_can_place_nowhere_is_an_error_of_the_engine(ray_case: EngineCase) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rlenv.engine.ray import RayEngine

    gone = NodeAffinitySchedulingStrategy("ab" * 28, soft=False)
    with pytest.raises(EngineDeadError, match="died"):
        RayEngine(default_model(), actor={"num_cpus": 0, "scheduling_strategy": gone}, device="cpu")


@pytest.mark.engine
def test_actor_that_dies_while_its_engine_starts_is_an_error(ray_case: EngineCase) -> None:
    import ray

    from rlenv.engine.ray import RayEngine

    class Doomed(RayEngine):
        async def _ask(self, method: str, *arguments: Any) -> Any:
            asyncio.get_running_loop().call_later(0.5, ray.kill, self._actor)
            return await super()._ask(method, *arguments)

    with pytest.raises(EngineDeadError, match="died"):
        Doomed(default_model(), actor={"num_cpus": 0}, device="cpu")


@pytest.mark.engine
def test_death_under_an_update_fails_all_calls_and_a_restart_proves_the_weights(ray_case: EngineCase) -> None:
    engine: Any = ray_case.engine
    version = engine.weight_version + 1
    family = _family()
    assert len(family) > 1  # the actor, and vLLM's processes below it

    class Killing:
        logprobs = ray_case.sender.logprobs

        def send(self, client: Any) -> Any:
            client.start_weight_update()
            family[0].kill()
            return ray_case.sender.send(client)

    flying = [engine.submit(ray_case.prompt_ids, LONG) for _ in range(8)]
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="died"):
        engine.update_weights_sync(Killing(), version)
    for future in flying:
        with pytest.raises(EngineDeadError, match="died"):
            future.result(10)
    assert time.monotonic() - began < 20
    with pytest.raises(EngineDeadError):
        engine.submit(ray_case.prompt_ids, LONG)
    assert not psutil.wait_procs(family, timeout=20)[1]
    report = engine.restart_sync(ray_case.sender, version)
    assert (report.version, engine.weight_version) == (version, version)
    completion = engine.generate_sync(ray_case.prompt_ids, LONG)
    assert completion.labels == {report.label}
    asyncio.run(engine.proven(completion.labels))


@pytest.mark.engine
def test_a_learner_in_an_actor_sends_its_weights_to_an_engine_in_another(ray_case: EngineCase) -> None:
    from rlenv.agents.ray_learner import RayLearner

    engine: Any = ray_case.engine
    learner = RayLearner(LearnerConfig(default_model(), transfer_backend=engine.transport), actor={"num_cpus": 0})
    try:
        flying = engine.submit(ray_case.prompt_ids, LONG)
        report = engine.update_weights_sync(learner, engine.weight_version + 1)
        assert report.tensors > 10 and 0 < report.mismatch_max <= 1e-4
        assert flying.result(60).finish_reason == "length"
    finally:
        learner.close()


def _family() -> list[psutil.Process]:
    """The actor's process and those below it."""
    below = psutil.Process().children(recursive=True)
    actor = next(process for process in below if " ".join(process.cmdline()).startswith("ray::Host"))
    return [actor, *actor.children(recursive=True)]
