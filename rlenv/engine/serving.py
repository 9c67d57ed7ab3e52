"""A model goes in; vLLM's own HTTP server on this machine comes out, healthy, and it ends with whoever started it.

    this process ─ api_server (HTTP) ─ EngineCore (scheduler) ─ Worker (model)

`ServerEngine` is the client. The server runs in vLLM's development mode, where anybody who can connect can change the
weights: it listens on loopback unless it is told otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import httpx
import psutil
import tyro

from rlenv.engine.process import SHUTDOWN_S, check_plugin, server_environment
from rlenv.engine.settings import EngineSettings, GPUTransport, engine_settings
from rlenv.engine.transfer.plugin import PARENT, SCRATCH
from rlenv.errors import ConfigError, EngineDeadError, EngineError

START_S = 600.0  # a large model is read from a slow disk
LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_TAIL_LINES = 12
# Development mode has the routes for pause, weights and RPC; scale-out has those for token ids.
_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
_FLAGS = ["--enable-scale-out", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]


class Server:
    """A running server: `url` is where it listens, `log` the file of its output. To be closed, or used in a `with`."""

    def __init__(self, settings: EngineSettings, host: str, port: int, token: str | None, log: Path | None) -> None:
        self.model, self.token = settings.model, token
        self._settings, self._host, self._port = settings, host, port
        self._scratch = tempfile.TemporaryDirectory(prefix="rlenv-server-")  # for vLLM's sockets, too
        self.log = log or Path(self._scratch.name, "server.log")
        try:
            self._start()
        except BaseException:
            self._scratch.cleanup()
            raise

    @property
    def processes(self) -> list[psutil.Process]:
        """The server and all below it that run now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            return [server, *server.children(recursive=True)]
        return []

    def wait(self) -> None:
        """Block until the server ends by itself, and raise EngineDeadError then."""
        status = self._process.wait()
        raise EngineDeadError(f"the server of {self.model!r} at {self.url} ended with status {status}{self._tail()}")

    def close(self) -> None:
        """End the server and every process below it. Closing twice is closing once."""
        self._end()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._settings.command_line(), *_FLAGS]
        own = {PARENT: str(os.getpid()), "VLLM_RPC_BASE_PATH": self._scratch.name, SCRATCH: self._scratch.name}
        extra = {**self._settings.environment, **_MODE, **own}
        if self.token:
            extra["VLLM_API_KEY"] = self.token  # on the command line every user of the machine could read it
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--host", self._host, "--port", str(self._port)],
                env=server_environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for us, who then end it in order
            )
        try:
            self.url = self._wait_until_healthy()
        except BaseException:
            self._end()
            raise

    def _wait_until_healthy(self) -> str:
        deadline = time.monotonic() + START_S
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if (status := self._process.poll()) is not None:
                    raise EngineError(f"no server started for {self.model!r}: status {status}{self._tail()}")
                for port in self._listening():
                    url = f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"
                    with contextlib.suppress(httpx.TransportError):
                        if client.get(f"{url}/health").is_success:
                            return url
                time.sleep(_POLL_S)
        raise EngineError(f"the server of {self.model!r} was not healthy after {START_S:.0f} s{self._tail()}")

    def _listening(self) -> list[int]:
        """Ports on which the server listens; port 0 lets the system choose one that nobody else can take meanwhile."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            connections = psutil.Process(self._process.pid).net_connections(kind="tcp")
            return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
        return []

    def _end(self) -> None:
        family = self.processes
        self._process.send_signal(signal.SIGTERM)
        psutil.wait_procs(family, timeout=SHUTDOWN_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=SHUTDOWN_S)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "".join(f"\n{line}" for line in lines)


def serve(
    model: str | os.PathLike[str],
    *,
    host: str = LOOPBACK,
    port: int = 0,
    token: str | None = None,
    log: Path | None = None,
    **settings: Any,
) -> Server:
    """Start vLLM's server for `model` and wait until it is healthy; `port=0` takes a free one.

    `settings` are those of `VLLMEngine`. `token` is what clients then have to send. Raises ConfigError for settings
    that cannot work, EngineError with the end of the server's output if it does not start.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"no port {port}: choose one from 1 to 65535, or 0 for any that is free")
    if settings.get("data_parallel_size", 1) != 1:
        raise ConfigError("a server tells what its first data-parallel rank holds: start a server for each instead")
    check_plugin()
    return Server(engine_settings(model, **settings), host, port, token, log)


def serve_until_ended(
    model: Annotated[str, tyro.conf.arg(name="", metavar="MODEL")],
    host: str = LOOPBACK,
    port: int = 8000,
    token: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    dtype: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.4,
    transport: GPUTransport | None = None,
    log: Path | None = None,
) -> None:
    """Serve a model over HTTP on this machine, for `ServerEngine`, until Ctrl-C.

    Args:
        model: Folder of a transformers model, or its name on the Hub.
        host: Address to listen on. Whoever can connect to it can change the weights.
        port: Port to listen on; 0 takes one that is free.
        token: What clients have to send as a bearer token with requests.
        device: cpu or cuda; left out, what vLLM was built for.
        dtype: Left out, float32 on a CPU and bfloat16 on a GPU.
        max_model_len: Length of the context; left out, the model's.
        max_num_seqs: Requests that run at once.
        gpu_memory_utilization: The server's share of a GPU's memory; the learner needs the rest.
        transport: How weights reach a GPU: ipc (the default) from a learner on the same one, nccl from another,
            shm through the machine's memory.
        log: File for the server's output.
    """
    settings = {
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "transport": transport,
    }
    with serve(model, host=host, port=port, token=token, log=log, **settings) as server:
        print(f"{server.model} is served at {server.url}", flush=True)
        server.wait()
