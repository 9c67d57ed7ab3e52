"""What vLLM's workers can be asked: how they were set up, the checkpoint tensors that they hold, their fingerprints.

Mixed into each worker by `worker_extension_cls`. A layer that runs on a packed copy of its weight (every linear
layer on CPUs) is read through the kernel that serves it: the identity matrix times the layer is its weight, exactly,
since each sum has one term that is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlenv.engine.transfer.digest import tensor_digest


class ProofExtension:
    """Adds `rlenv_settings`, `rlenv_weights` and `rlenv_recover` to a vLLM worker."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    def rlenv_settings(self) -> dict[str, Any]:
        """What a client of a server cannot know otherwise: dtype, transport, and sizes that a canary depends on."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "transport": None if transfer is None else transfer.backend,
            "logprobs_mode": config.model_config.logprobs_mode,
            "vocabulary": config.model_config.get_vocab_size(),
            "block": config.cache_config.block_size,
            "ranks": config.parallel_config.data_parallel_size,
        }

    def rlenv_weights(self) -> dict[str, list[list[Any]]]:
        """Fingerprints of everything this worker computes with.

        `checkpoint`: rows `[checkpoint name, held as, dtype, shape, value]`; a tensor held twice (a tied head
        and its packed copy) has two rows. `constant`: the same for tensors that come from no checkpoint and
        never change (rotary tables, padding rows of the vocabulary).
        """
        model = self.model_runner.get_model()
        rows: dict[str, list[list[Any]]] = {"checkpoint": [], "constant": []}
        for held in _held(model):
            digest = tensor_digest(held.read())
            row = [held.checkpoint_name, held.held_as, digest.dtype, list(digest.shape), digest.value]
            rows["constant" if held.constant else "checkpoint"].append(row)
        return rows

    def rlenv_recover(self) -> None:
        """Forget an update that did not finish, and zero the key-value cache.

        A NaN that bad weights left in the cache would outlive them: attention kernels give masked positions the
        weight 0, and 0 × NaN is NaN.
        """
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        for cache in self.model_runner.kv_caches:
            cache.zero_()


@dataclass(frozen=True)
class _Held:
    """Rows `[start, end)` of one live tensor, and the checkpoint tensor they come from."""

    checkpoint_name: str
    held_as: str
    tensor: torch.Tensor | None
    kernel: torch.nn.Module | None = None
    start: int = 0
    end: int | None = None
    constant: bool = False

    def read(self) -> torch.Tensor:
        whole = self.tensor if self.kernel is None else _read_through_kernel(self.kernel)
        assert whole is not None
        return whole if whole.ndim == 0 else whole[self.start : self.end]


def _held(model: torch.nn.Module) -> Iterator[_Held]:
    packed_names = getattr(model, "packed_modules_mapping", {})
    names: dict[int, str] = {}  # a tied parameter is known by the first name that holds it
    for prefix, module in model.named_modules():
        kernel = module if _has_packed_copy(module) else None
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}"
            checkpoint_name = names.setdefault(id(parameter), name) if parameter.numel() else name
            if parameter.numel() and checkpoint_name == name:
                yield from _parts(name, name, module, parameter, None, packed_names)
            if kernel is not None and leaf == "weight":
                yield from _parts(checkpoint_name, name, module, parameter, kernel, packed_names)
        for leaf, buffer in module.named_buffers(recurse=False):
            if buffer.numel() and buffer.device.type != "meta":
                name = f"{prefix}.{leaf}"
                yield _Held(name, name, buffer, constant=True)


def _parts(
    checkpoint_name: str,
    name: str,
    module: Any,
    parameter: torch.Tensor,
    kernel: torch.nn.Module | None,
    packed_names: dict[str, list[str]],
) -> Iterator[_Held]:
    held_as = f"{name} (packed)" if kernel is not None else name
    vocabulary = getattr(module, "org_vocab_size", None)
    if vocabulary is not None:
        yield _Held(checkpoint_name, held_as, parameter, kernel, 0, vocabulary)
        if module.num_embeddings_padded > vocabulary and kernel is None:
            yield _Held(f"{name} (padding)", held_as, parameter, None, vocabulary, None, constant=True)
        return
    parent, _, leaf = checkpoint_name.rpartition(".")
    stem, _, fused = parent.rpartition(".")
    if fused not in packed_names or len(packed_names[fused]) < 2:
        yield _Held(checkpoint_name, held_as, parameter, kernel)
        return
    start = 0
    for part, size in zip(packed_names[fused], module.output_sizes, strict=True):
        yield _Held(f"{stem}.{part}.{leaf}", held_as, parameter, kernel, start, start + size)
        start += size


def _has_packed_copy(module: torch.nn.Module) -> bool:
    return getattr(module, "cpu_linear", None) not in (None, torch.nn.functional.linear)


def _read_through_kernel(module: Any) -> torch.Tensor:
    """The weight [out, in] that the layer's kernel multiplies by."""
    width = getattr(module, "input_size", None) or module.embedding_dim
    identity = torch.eye(width, dtype=_dtype(module))
    return module.cpu_linear(identity, module.weight, None).T.contiguous()


def _dtype(module: Any) -> torch.dtype:
    dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype
