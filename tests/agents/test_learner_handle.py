import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import group, tiny_model, trajectory

from rlenv.agents.advantages import score
from rlenv.agents.learner_handle import LearnerHandle
from rlenv.agents.learner_types import LearnerConfig, StepMetrics
from rlenv.agents.packing import Batch, pack
from rlenv.engine.base import Peer
from rlenv.errors import ConfigError, EngineError, LearnerError

HERE = Path(__file__).parent
WANTED = 11


class RecordingClient:
    """The engine's end: keeps what it was given."""

    peer = Peer("an engine", 1, 2)

    def __init__(self, refuse: str = "") -> None:
        self.calls: list[str] = []
        self.weights: dict[str, Any] = {}
        self.refuse = refuse

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init_weight_transfer_engine")

    def start_weight_update(self) -> None:
        if self.refuse:
            raise ConnectionError(self.refuse)
        self.calls.append("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update_weights")
        self.weights = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish_weight_update")


@dataclass
class Shared:
    """One learner for all tests that leave it alive; `order` tells its sender what to do next."""

    learner: LearnerHandle
    orders: Path

    def order(self, what: str) -> None:
        self.orders.write_text(what)

    def step(self) -> StepMetrics:
        rows = [trajectory(reward=1, version=self.learner.version), trajectory((1, 2), (3, 4))]
        return asyncio.run(self.learner.step(pack(score([group(*rows)]), version=self.learner.version)))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    return str(folder)


def start(model: str, orders: Path, order: str = "", *, by: str = "process", **actor: Any) -> LearnerHandle:
    orders.write_text(order)
    config = LearnerConfig(model, lr=1e-2, sender="fake_sender:FakeSender", transfer_backend=str(orders))
    if by == "process":
        return LearnerHandle(config)
    from rlenv.agents.ray_learner import RayLearner

    environment = {"runtime_env": {"env_vars": {"PYTHONPATH": str(HERE)}}}
    return RayLearner(config, actor={"num_cpus": 0, **environment, **actor})


@pytest.fixture(scope="module")
def _environment() -> Iterator[None]:
    launcher = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        for name, value in launcher.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def alive(
    model_folder: str, tmp_path_factory: pytest.TempPathFactory, _environment: None, request: pytest.FixtureRequest
) -> Iterator[Shared]:
    if request.param == "ray":
        request.getfixturevalue("local_ray")
    orders = tmp_path_factory.mktemp("orders") / "order"
    shared = Shared(start(model_folder, orders, by=request.param), orders)
    pid = shared.learner.pid
    yield shared
    shared.learner.close()
    wait_until(lambda: not is_alive(pid), 10)


@pytest.fixture
def shared(alive: Shared) -> Iterator[Shared]:
    yield alive
    alive.order("")
    alive.learner.send(RecordingClient())


def one_token_rollouts(learner: LearnerHandle, rng: np.random.Generator) -> tuple[Batch, float]:
    """64 samples of one id after id 1, rewarded where it is WANTED; and how likely that is."""
    logprobs = np.array([values[0] for values in learner.logprobs([[1, id] for id in range(24)])])
    chances = np.exp(logprobs) / np.exp(logprobs).sum()
    drawn = rng.choice(24, size=64, p=chances).tolist()
    version = learner.version
    rows = [
        trajectory((1,), (id,), reward=float(id == WANTED), logprobs=(float(logprobs[id]),), version=version)
        for id in drawn
    ]
    return pack(score([group(*rows)]), version=version), float(chances[WANTED])


@pytest.mark.slow
def test_a_learner_in_its_own_process_learns_to_prefer_a_token(shared: Shared) -> None:
    learner, client, rng = shared.learner, RecordingClient(), np.random.default_rng(0)

    async def train() -> list[float]:
        await learner.ready()
        chances = []
        for _ in range(25):
            learner.send(client)
            rollouts, chance = one_token_rollouts(learner, rng)
            chances.append(chance)
            metrics = await learner.step(rollouts)
            assert metrics.version == learner.version
            assert metrics.fresh is not None and metrics.fresh.abs_max < 1e-4
        return chances

    chances = asyncio.run(train())
    assert chances[0] < 0.2 and chances[-1] > 0.9, chances


@pytest.mark.slow
def test_launcher_variables_do_not_reach_the_process(shared: Shared) -> None:
    assert os.environ["WORLD_SIZE"] == "4"
    assert shared.step().version == shared.learner.version


@pytest.mark.parametrize("order", ["", "thread"])
def test_sending_relays_the_handshake_and_returns_the_manifest(shared: Shared, order: str) -> None:
    import torch  # not at the top: the hosts below import this module, and start without it

    client, model = RecordingClient(), tiny_model()
    shared.order(order)
    manifest = shared.learner.send(client)
    names = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    assert client.calls == names
    weights = {name: torch.from_numpy(value) for name, value in client.weights.items()}
    assert {name: digest.shape for name, digest in manifest.items()} == {n: tuple(w.shape) for n, w in weights.items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    expected = model(torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)[[0, 1], [2, 3]]
    assert shared.learner.logprobs([[1, 2, 3]])[0] == pytest.approx(expected.tolist(), abs=1e-5)


def test_logprobs_of_weights_that_have_moved_on_are_refused(shared: Shared) -> None:
    shared.learner.send(RecordingClient())
    before = shared.learner.logprobs([[1, 2, 3]])
    shared.step()
    with pytest.raises(LearnerError, match=r"version \d+ was sent, but the learner is at"):
        shared.learner.logprobs([[1, 2, 3]])
    shared.learner.send(RecordingClient())
    assert shared.learner.logprobs([[1, 2, 3]]) != before


def test_an_engine_that_refuses_is_heard_as_itself_and_the_learner_lives_on(shared: Shared) -> None:
    with pytest.raises(ConnectionError, match="no such engine"):
        shared.learner.send(RecordingClient(refuse="no such engine"))
    assert len(shared.learner.send(RecordingClient())) > 10


def test_an_exception_in_the_process_carries_its_traceback_and_the_learner_lives_on(shared: Shared) -> None:
    shared.order("raise")
    with pytest.raises(LearnerError, match=r"(?s)failed in send.*fake_sender\.py.*FloatingPointError: planted"):
        shared.learner.send(RecordingClient())
    wrong = pack(score([group(trajectory(reward=1), trajectory())]), version=999)
    with pytest.raises(LearnerError, match="packed for version 999, the learner is at"):
        asyncio.run(shared.learner.step(wrong))
    assert shared.step().loss != 0


def test_a_setting_that_cannot_work_is_told_without_a_traceback(shared: Shared) -> None:
    shared.order("refuse")
    with pytest.raises(ConfigError, match=r"^no such backend$"):
        shared.learner.send(RecordingClient())


@pytest.mark.slow
def test_the_first_core_is_left_to_the_engine(shared: Shared) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shared.order("cores")
    assert list(shared.learner.send(RecordingClient())) == [",".join(map(str, cores[1:] or cores))]


@pytest.mark.slow
def test_a_call_that_a_sender_leaves_behind_does_not_take_the_next_requests_answer(shared: Shared) -> None:
    class Slow(RecordingClient):
        def update_weights(self, update_info: Any) -> None:
            time.sleep(1)  # longer than the sender has patience
            super().update_weights(update_info)

    client = Slow()
    shared.order("leave a call behind")
    with pytest.raises(EngineError, match="the engine did not come"):
        shared.learner.send(client)
    assert client.calls == ["update_weights"]
    shared.order("")
    shared.learner.send(RecordingClient())
    shared.step()


@pytest.mark.slow
def test_the_sender_is_told_which_engine_it_sends_to(shared: Shared) -> None:
    shared.order("peer")
    assert list(shared.learner.send(RecordingClient())) == [repr(RecordingClient.peer)]


@pytest.mark.slow
@pytest.mark.parametrize("alive", ["process"], indirect=True)
def test_ctrl_c_is_the_hosts_to_handle(shared: Shared) -> None:
    asyncio.run(shared.learner.ready())
    os.kill(shared.learner.pid, signal.SIGINT)
    shared.step()
    assert os.getpgid(shared.learner.pid) != os.getpgid(0)


def sending(learner: LearnerHandle) -> tuple[threading.Thread, list[str]]:
    """A thread in the midst of a `send` that never ends by itself, and the LearnerErrors that it will hear."""
    client, heard = RecordingClient(), list[str]()

    def send() -> None:
        try:
            learner.send(client)
        except LearnerError as error:
            heard.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: bool(client.calls), 60)
    return thread, heard


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_a_death_of_the_process_is_an_error_with_its_exit_code(model_folder: str, tmp_path: Path) -> None:
    learner = start(model_folder, tmp_path / "order", "die")
    learner.check()
    with pytest.raises(LearnerError, match="ended with code 7 during send"):
        learner.send(RecordingClient())
    with pytest.raises(LearnerError, match="ended with code 7 during a wait for data"):
        learner.check()
    with pytest.raises(LearnerError, match="ended with code 7 during logprobs"):
        learner.logprobs([[1, 2]])
    learner.close()
    learner.close()
    with pytest.raises(LearnerError, match="was closed: no logprobs"):
        learner.logprobs([[1, 2]])


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_a_death_of_the_actor_is_an_error_at_once(local_ray: None, model_folder: str, tmp_path: Path) -> None:
    learner = start(model_folder, tmp_path / "order", "spin", by="ray")
    asyncio.run(learner.ready())
    learner.check()
    thread, heard = sending(learner)
    os.kill(learner.pid, signal.SIGKILL)
    thread.join(20)
    assert heard and "the learner's actor ended during send" in heard[0]
    with pytest.raises(LearnerError, match="ended during a wait for data"):
        learner.check()
    learner.close()
    learner.close()
    with pytest.raises(LearnerError, match="was closed: no logprobs"):
        learner.logprobs([[1, 2]])


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_a_learner_that_ray_cannot_place_is_an_error_and_stays_one(
    local_ray: None, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlenv.agents.ray_learner.START_S", 1.0)
    learner = start(model_folder, tmp_path / "order", by="ray", resources={"nowhere": 1})
    for _ in range(2):
        with pytest.raises(LearnerError, match=r"did not place the learner in 1 s: has it .*nowhere"):
            learner.logprobs([[1, 2]])
    learner.close()


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, ("no number",)


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_a_request_that_cannot_be_read_ends_the_learner_with_its_reason(
    local_ray: None, model_folder: str, tmp_path: Path
) -> None:
    learner = start(model_folder, tmp_path / "order", by="ray")
    with pytest.raises(LearnerError, match=r"(?s)actor ended during step.*TypeError"):
        asyncio.run(asyncio.wait_for(learner.step(Unreadable()), 60))
    with pytest.raises(LearnerError, match="TypeError"):
        learner.check()
    learner.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_a_learner_that_nobody_holds_ends(local_ray: None, model_folder: str, tmp_path: Path) -> None:
    learner = start(model_folder, tmp_path / "order", by="ray")
    pid = learner.pid
    del learner
    gc.collect()
    wait_until(lambda: not is_alive(pid), 10)


def test_ray_is_started_first_and_chooses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from rlenv.agents.ray_learner import RayLearner

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"call ray\.init\(\) first"):
        RayLearner(LearnerConfig("m"))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="leave gpu=1 out"):
        RayLearner(LearnerConfig("m", device="cuda", gpu=1))


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_a_model_that_cannot_be_loaded_is_an_error_with_its_traceback(tmp_path: Path) -> None:
    learner = start(str(tmp_path), tmp_path / "order")
    with pytest.raises(LearnerError, match=r"(?s)failed in ready.*Traceback.*config\.json"):
        asyncio.run(learner.ready())
    learner.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
def test_closing_in_the_middle_of_a_request_ends_both(model_folder: str, tmp_path: Path) -> None:
    learner = start(model_folder, tmp_path / "order", "spin")
    thread, heard = sending(learner)
    began = time.monotonic()
    learner.close()
    thread.join(5)
    assert time.monotonic() - began < 5
    assert heard and "was closed" in heard[0]
    assert not is_alive(learner.pid)


# No guard around the main module: the learner's process must not run it again.
HOST = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from test_learner_handle import RecordingClient, start

    class Client(RecordingClient):
        def start_weight_update(self):
            print("computing", flush=True)

    model, order, moment = sys.argv[1:]
    learner = start(model, Path(order), "spin")
    print(learner.pid, flush=True)
    if moment == "starting":
        time.sleep(60)
    if os.fork() == 0:  # a child of the host that holds its pipes, as an engine's workers may
        time.sleep(20)
        os._exit(0)
    learner.logprobs([[1, 2]])
    if moment == "idle":
        print("idle", flush=True)
        time.sleep(60)
    learner.send(Client())
""")


@pytest.mark.slow
@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("moment", ["starting", "idle", "computing"])
def test_the_process_ends_when_its_host_is_killed(model_folder: str, tmp_path: Path, moment: str) -> None:
    command = [sys.executable, "-c", HOST, model_folder, str(tmp_path / "order"), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        if moment != "starting":
            assert host.stdout.readline().strip() == moment
        assert is_alive(pid)
        host.kill()
        wait_until(lambda: not is_alive(pid), 5)


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
