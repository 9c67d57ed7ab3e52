"""What vLLM's HTTP server can be asked, call by call: token ids, pauses and weights go in, typed answers come out.

Routes of vLLM 0.32 in development mode (`vllm/entrypoints/rl`, `serve/dev`) and of its token-in, token-out endpoint
(`scale_out`), with our worker extension behind `/collective_rpc`. Nothing is remembered here between two calls.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlenv.engine.base import PauseMode
from rlenv.engine.http import Routes
from rlenv.engine.requests import canary_fields, canary_length
from rlenv.engine.transfer.proof import CanaryResult, WeightRows, canary_prompt
from rlenv.engine.transfer.update import PROOF_DEADLINE_S
from rlenv.errors import ConfigError, EngineDeadError, EngineError

GENERATE = "/inference/v1/generate"
COMPLETE = "/v1/completions"
_PREFIX = "generate-tokens-"  # vLLM's name of a request is ours with this before it
# What the model's generation config would otherwise fill in.
_PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_NOT_IN_JSON = "not JSON compliant"  # how the server says that a NaN or an infinity was to be answered


@dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled for one request: ids and log-probs [T], spans `(label, start, end)`, log-probs of the prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[str, int, int], ...]
    prefill: tuple[float, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Setup:
    """How the server's one worker was set up; `block` is that of the prefix cache, in ids."""

    dtype: str
    transport: str | None
    logprobs_mode: str
    vocabulary: int
    block: int
    ranks: int = 1  # data-parallel ones


class RemoteVLLM:
    """The vLLM server at `url`. Every call raises EngineError, EngineDeadError or ConfigError as `http` says."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 30.0) -> None:
        self._routes = Routes(url, token, timeout_s=timeout_s)
        self.url = self._routes.url

    async def model(self) -> tuple[str, int]:
        """The folder that the model was loaded from, as the server calls it, and the context's length."""
        card = (await self._routes.get("/v1/models"))["data"][0]  # adapters come after the model
        return card["root"], card["max_model_len"]

    async def check_health(self) -> None:
        await self._routes.get("/health")

    async def generate(
        self, name: str, internal: str, prompt: Sequence[int], fields: dict[str, Any], salt: str
    ) -> Answer:
        """Sample for `prompt`; cancelled, the server aborts it. `internal` is a name that no other request has."""
        body = {"request_id": internal, "token_ids": prompt, "sampling_params": fields, "cache_salt": salt}
        answer = await self._routes.request(GENERATE, body, name=name)
        choice = answer["choices"][0]
        rows = choice["logprobs"]["content"] or []
        return Answer(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(row["logprob"] for row in rows),
            spans=tuple((span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []),
            prefill=_prefill(prompt, answer["prompt_logprobs"]),
            finish_reason=choice["finish_reason"],
        )

    async def complete(self, name: str, prompt: Sequence[int], fields: dict[str, Any]) -> Answer:
        """The same by the route that every server has: it tells no labels."""
        body = {**_PLAIN, **fields, "prompt": prompt, "return_token_ids": True}
        choice = (await self._routes.request(COMPLETE, body, name=name))["choices"][0]
        return Answer(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            spans=(),
            prefill=_prefill(prompt, choice["prompt_logprobs"]),
            finish_reason=choice["finish_reason"],
        )

    async def abort(self, internal: Sequence[str]) -> None:
        """Abort requests by their internal names; those that have not arrived yet are passed over."""
        await self._routes.post("/abort_requests", {"request_ids": [_PREFIX + name for name in internal]}, again=True)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Waiting for requests takes as long as they take."""
        params = {"mode": mode, "clear_cache": clear_cache}
        timeout_s = math.inf if mode == "wait" else None
        await self._routes.post("/pause", params=params, timeout_s=timeout_s, again=True)

    async def resume(self, *, timeout_s: float | None = None) -> None:
        await self._routes.post("/resume", timeout_s=timeout_s, again=True)

    async def is_paused(self) -> bool:
        return bool((await self._routes.get("/is_paused"))["is_paused"])

    async def label(self) -> str:
        """The label of the weights; `default` since vLLM's start until somebody sets another."""
        return str((await self._routes.get("/weight_info"))["weight_version"])

    async def set_label(self, label: str) -> None:
        await self._routes.post("/update_weight_version", {"new_version": label}, again=True)

    async def transfer(self, method: str, info: Any = None) -> None:
        """One of vLLM's calls of a weight update, never made twice; how long it may take is for the caller to say."""
        await self._routes.post(f"/{method}", _in_json(info or {}), timeout_s=math.inf)

    async def setup(self) -> Setup:
        """Raises ConfigError if our worker extension is not there, EngineError if workers hold shards."""
        try:
            workers = await self.extension("rlenv_settings")
        except EngineDeadError:
            raise
        except EngineError as error:
            raise ConfigError(
                f"the server at {self.url} was started without rlenv's worker extension: use `rlenv serve`, or add "
                "--worker-extension-cls rlenv.engine.transfer.worker.ProofExtension"
            ) from error
        if len(workers) != 1:
            raise EngineError(f"{len(workers)} workers hold the weights in shards: the proof covers one worker")
        setup = Setup(**workers[0])
        if setup.ranks != 1:
            raise EngineError(
                f"the server at {self.url} has {setup.ranks} data-parallel ranks, and tells over HTTP what the first "
                "one holds: start a server for each, and an EngineGroup of them"
            )
        return setup

    async def dtype(self) -> str:
        """The model's dtype, of a server without our extension; it looks at the whole machine first."""
        config = (await self._routes.get("/server_info?config_format=json", timeout_s=PROOF_DEADLINE_S))["vllm_config"]
        return str(config["model_config"]["dtype"]).removeprefix("torch.")

    async def weights(self) -> list[WeightRows]:
        """Fingerprints of what each worker computes with."""
        return await self.extension("rlenv_weights")

    async def extension(self, method: str) -> list[Any]:
        """What each worker answers to a call of our worker extension, which may be made again."""
        call = self._routes.post("/collective_rpc", {"method": method}, timeout_s=PROOF_DEADLINE_S, again=True)
        return list((await call)["results"])

    async def close(self) -> None:
        await self._routes.close()


async def canaries(
    run: Callable[[Sequence[int], dict[str, Any]], Awaitable[Answer]], vocabulary: int, block: int, max_model_len: int
) -> list[CanaryResult]:
    """Three requests, one after the other, each decoded beside whatever else is in flight.

    The first reads what the prefix cache held before, if anything; the second computes its whole prompt; the third
    reads the blocks that the second wrote.
    """
    prompt = tuple(canary_prompt(vocabulary, canary_length(block, max_model_len)))

    async def ask(**extra: Any) -> Answer:
        try:
            return await run(prompt, canary_fields() | extra)
        except EngineError as error:
            if _NOT_IN_JSON not in str(error):
                raise
            return Answer((), (), (), (math.nan,) * (len(prompt) - 1), None)

    before, computed, after = await ask(), await ask(prompt_logprobs=0), await ask()
    return [
        CanaryResult("prefill", prompt, computed.prefill),
        CanaryResult("decode", prompt + computed.token_ids, computed.logprobs),
        CanaryResult("cached-prefix", prompt + before.token_ids, before.logprobs),
        CanaryResult("cached-prefix", prompt + after.token_ids, after.logprobs),
    ]


def _prefill(prompt: Sequence[int], rows: list[dict[str, Any] | None] | None) -> tuple[float, ...]:
    """Log-probs [P - 1] of ids 1..P-1 of the prompt, if they were asked for."""
    if rows is None:
        return ()
    return tuple(float((row or {})[str(i)]["logprob"]) for i, row in zip(prompt[1:], rows[1:], strict=True))


def _in_json(value: Any) -> Any:
    """The same with bytes, which JSON has not, in base64; the worker's end of a transport puts them back."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    return [_in_json(item) for item in value] if isinstance(value, list | tuple) else value
