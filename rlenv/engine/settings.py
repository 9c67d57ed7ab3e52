"""A model and what the user asks for go in; the arguments of its vLLM engine come out, in process or as a server."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlenv.engine.backend import Backend
from rlenv.engine.platforms import Rules, batch_invariance_on
from rlenv.engine.transfer.plugin import EXTENSION, IPC, NCCL, SHARED_MEMORY
from rlenv.errors import ConfigError
from rlenv.render import Renderer

GPUTransport = Literal["ipc", "nccl", "shm"]
RanksBackend = Literal["mp", "ray"]
_ON_GPUS: dict[str, str] = {
    "ipc": IPC,
    "nccl": NCCL,
    "shm": SHARED_MEMORY,
}  # by the names under which vLLM's workers know them


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How vLLM is started: the arguments of its engine, the weight transport, and variables of its processes."""

    model: str
    device: str
    dtype: str
    transport: str
    max_model_len: int
    arguments: dict[str, Any]
    environment: dict[str, str]

    def command_line(self) -> list[str]:
        """The same as options of vLLM's command line."""
        options = {**self.arguments, "weight_transfer_config": {"backend": self.transport}}
        return [word for name, value in options.items() for word in _option(name.replace("_", "-"), value)]


def engine_settings(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    dtype: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    seed: int = 0,
    batch_invariant: bool = False,
    gpu_memory_utilization: float = 0.4,
    worker_extension: str = EXTENSION,
    cpu_cores: str | None = None,
    data_parallel_size: int = 1,
    data_parallel_backend: RanksBackend = "mp",
    transport: GPUTransport | None = None,
    backend: Backend | None = None,
) -> EngineSettings:
    """Fill in what is left out: float32 on a CPU, bfloat16 on a GPU. Raises ConfigError for what cannot work."""
    folder = model_folder(model)
    device = _device(device)
    cpu = device == "cpu"
    if cpu_cores is not None and not cpu:
        raise ConfigError("cpu_cores binds an engine on a CPU: leave it out on a GPU")
    if transport is not None and cpu:
        raise ConfigError(f"weights reach an engine on a CPU by shared memory: leave transport={transport!r} out")
    if data_parallel_backend == "ray" and cpu:
        raise ConfigError("Ray places data-parallel ranks on GPUs: leave data_parallel_backend='ray' out on a CPU")
    rules = batch_invariance_on(device) if batch_invariant else Rules()
    dtype = dtype or ("float32" if cpu else "bfloat16")
    context = max_model_len or context_of(folder)
    arguments: dict[str, Any] = {
        "model": folder,
        "dtype": dtype,
        "max_model_len": context,
        "max_num_seqs": max_num_seqs,
        "seed": seed,
        "enforce_eager": cpu,
        "worker_extension_cls": worker_extension,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "data_parallel_size": data_parallel_size,
        "data_parallel_backend": data_parallel_backend,
        **(backend or Backend()).arguments(device, dtype, context),
        **rules.arguments,
    }
    if data_parallel_backend == "ray":
        arguments["data_parallel_address"] = _address_in_ray()
    if not cpu:
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
    environment = dict(rules.environment)
    if cpu_cores is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cpu_cores
    return EngineSettings(
        model=folder,
        device=device,
        dtype=dtype,
        transport=SHARED_MEMORY if cpu else _ON_GPUS[transport or "ipc"],
        max_model_len=context,
        arguments=arguments,
        environment=environment,
    )


def _address_in_ray() -> str:
    """This machine's, as its Ray knows it: vLLM would take VLLM_HOST_IP, and find no such node."""
    try:
        import ray.util
    except ImportError as error:
        raise ConfigError("data_parallel_backend='ray' needs Ray: pip install 'rlenv[ray]'") from error
    return str(ray.util.get_node_ip_address())


@functools.lru_cache(maxsize=4)
def tokenizer_of(model: str) -> Any:
    """The transformers tokenizer of `model`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def end_ids(model: str) -> list[int]:
    """Ids that end a turn: by the chat template and tokenizer, and by the generation config."""
    from transformers import GenerationConfig

    ids = set(Renderer(tokenizer_of(model)).stop_ids)
    with contextlib.suppress(OSError):  # a model folder need not have one
        configured = GenerationConfig.from_pretrained(model).eos_token_id
        ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(i for i in ids if i is not None)


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def model_folder(model: str | os.PathLike[str]) -> str:
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{str(model)!r} holds no config.json: name the folder of a saved model")
    if not folder.exists() and (
        folder.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1
    ):
        raise ConfigError(f"no model folder {str(model)!r}: name the folder of a saved model")
    return str(folder) if folder.exists() else str(model)


def _device(device: str | None) -> str:
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"no device {device!r}: use 'cpu' or 'cuda'")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' needs a GPU and none is visible: use device='cpu'")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def context_of(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).max_position_embeddings)
