"""Calls of the engine go in, their results come out, also when the engine dies under them.

    call ─EngineDeadError→ [one restart for all who wait ─ weights of the learner's version ─ proof] ─→ call again

What had been asked of the dead engine is lost; the caller asks again for the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlenv.agents.tally import Tally
from rlenv.engine.base import Engine, WeightSender
from rlenv.errors import EngineDeadError

T = TypeVar("T")
MAX_RESTARTS = 3  # in one run: an engine that dies more often has a fault that no restart mends


class Revival:
    """Restarts `engine` when it dies, at the `version` that `learner` holds.

    Whoever changes the learner's weights holds `learning` meanwhile and then sets `version`. `tell` is what a person
    is told of it.
    """

    def __init__(
        self, engine: Engine, learner: WeightSender, tally: Tally, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.version = 0
        self.learning = asyncio.Lock()
        self.tally = tally
        self._engine, self._learner, self._tell = engine, learner, tell
        self._reviving = asyncio.Lock()

    async def outlive(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()`, again after each death of the engine. Raises EngineDeadError at the death after the last."""
        while True:
            life = self.tally.engine_restarts
            try:
                return await call()
            except EngineDeadError as death:
                await self._revive(life, death)

    async def _revive(self, life: int, death: EngineDeadError) -> None:
        async with self._reviving:
            if self.tally.engine_restarts > life:
                return  # another caller was here first
            if life == MAX_RESTARTS:
                raise death
            self._tell(f"{death}; it is started again, and they are asked for again")
            async with self.learning:
                report = await self._engine.restart(self._learner, self.version)
            self.tally.add_restart(report)
            self._tell(f"the engine serves again, with weights {report.version}, proven")
