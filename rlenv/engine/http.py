"""One call of a vLLM server's route goes in, its JSON answer comes out, or one error that names the call and the route.

    no connection, broken off, no answer in time, a dead engine behind it → EngineDeadError
    401, 403, 404: what was typed or how the server was started cannot work → ConfigError
    any other refusal → EngineError with the server's own words

Only what never reached the server, or may be done twice, is tried again.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx

from rlenv.errors import ConfigError, EngineDeadError, EngineError

CONNECT_S = 5.0
PAUSES_S = (0.1, 0.4)  # before a second and a third try
HOW_TO_START = "start it with `rlenv serve`, or vLLM's own with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
MAX_CONNECTIONS = 512  # requests beyond wait on our side: each takes a file descriptor at both ends


class Routes:
    """The routes of the server at `url`; an answer may take `timeout_s` unless a call says otherwise (`inf`: no limit).

    Connections are not kept: vLLM closes one after each error of its own, which would break the next call on it.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float) -> None:
        self.url = _checked(url)
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, trust_env=False)
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def get(self, route: str, *, timeout_s: float | None = None) -> Any:
        """The JSON answer to a question, which may be asked again."""
        return await self._call("GET", route, None, None, "", timeout_s or self._timeout_s, again=True)

    async def post(
        self,
        route: str,
        body: Any = None,
        *,
        params: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        again: bool = False,
    ) -> Any:
        """The JSON answer to an order; `again` says that doing it twice is doing it once."""
        return await self._call("POST", route, body, params, "", timeout_s or self._timeout_s, again)

    async def request(self, route: str, body: Any, *, name: str) -> Any:
        """The JSON answer to the request called `name`, which may take as long as it takes."""
        async with self._slots:
            return await self._call("POST", route, body, None, name, math.inf, again=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self, method: str, route: str, body: Any, params: Any, name: str, timeout_s: float, again: bool
    ) -> Any:
        what = f"{method} {self.url}{route}" + (f" for request {name!r}" if name else "")
        timeout = httpx.Timeout(None if timeout_s == math.inf else timeout_s, connect=CONNECT_S)
        for pause in (*PAUSES_S, None):
            try:
                answer = await self._client.request(method, route, json=body, params=params, timeout=timeout)
                break
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                if isinstance(error, httpx.TimeoutException) and not unsent:
                    raise EngineDeadError(f"{what} was not answered within {timeout_s:g} s") from None
                if pause is None or not (unsent or again):
                    how = "found no server" if unsent else "was broken off"
                    raise await self._lost(f"{what} {how}: {error or type(error).__name__}") from None
                await asyncio.sleep(pause)
        return await self._read(answer, what)

    async def _read(self, answer: httpx.Response, what: str) -> Any:
        if answer.is_success:
            try:
                return answer.json() if answer.content else None
            except ValueError:
                raise EngineError(f"{what} was not answered in JSON: {answer.text[:200]!r}") from None
        said = f"{what} was answered with {answer.status_code}: {_message(answer)}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(f"{said}: pass the token that the server was started with")
        if answer.status_code in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
            raise ConfigError(f"{said}: {HOW_TO_START}")
        raise await self._lost(said) if answer.is_server_error else EngineError(said)

    async def _lost(self, said: str) -> EngineError:
        """What an error of the server means: it is dead, or this call alone failed."""
        try:
            health = await self._client.get("/health", timeout=self._timeout_s)
        except httpx.TransportError:
            return EngineDeadError(said)
        return EngineError(said) if health.is_success else EngineDeadError(f"{said}, and its engine is dead")


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"no server can be at {url!r}: type something like 'http://127.0.0.1:8000'")
    return url.rstrip("/").removesuffix("/v1")


def _message(answer: httpx.Response) -> str:
    """vLLM's own words, whichever of its three forms of error this is."""
    try:
        said = answer.json()
    except ValueError:
        return answer.text[:200]
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
