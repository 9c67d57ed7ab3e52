"""Engines that fail on purpose, for tests of a group, and what is asked of the group they are in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rlenv.engine.base import Engine, Manifest, PauseMode, UpdateReport, WeightSender, WeightSyncClient
from rlenv.engine.group import EngineGroup
from rlenv.engine.scripted import ScriptedEngine
from rlenv.types import Sample

PROMPT = [10, 11]
LONG = Sample(max_tokens=60, ignore_eos=True)
SOON_S = 5.0


class Failing(ScriptedEngine):
    """A scripted engine whose `hangs` and `breaks` name what does not end or raises."""

    hangs = breaks = ""

    async def _fault(self, what: str) -> None:
        if self.breaks == what:
            raise OSError(f"cannot {what}")
        if self.hangs == what:
            await asyncio.Event().wait()

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._fault("pause")
        await super()._pause(mode, clear_cache)

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        await self._fault("abort")
        await super()._abort(request_ids)

    async def _update_weights(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport:
        await self._fault("update")
        return await super()._update_weights(sender, version, mode, clear_cache)

    async def _start_again(self) -> None:
        await self._fault("restart")
        self.hangs = self.breaks = ""
        await super()._start_again()


class Sender:
    """A sender that runs `before[n]` before its n-th transfer."""

    def __init__(self, sender: WeightSender, **before: Callable[[], None]) -> None:
        self._sender, self._before, self._sent = sender, before, 0
        self.logprobs = sender.logprobs

    def send(self, client: WeightSyncClient) -> Manifest:
        self._sent += 1
        self._before.get(f"at{self._sent}", lambda: None)()
        return self._sender.send(client)


def served_by(group: Engine) -> set[str]:
    """The labels of a few requests, sent at once."""
    futures = [group.submit(PROMPT, Sample(max_tokens=3)) for _ in range(6)]
    return {label for future in futures for label in future.result(SOON_S).labels}


def all_run(group: EngineGroup) -> bool:
    """Whether every engine that was put in quarantine has been started again."""
    return soon(lambda: all(member.state != "down" for member in group._members))


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
