"""An engine whose weights are updated and proven by `transfer.update`: the faces of its updates, and how it opens."""

from __future__ import annotations

from typing import Any

from rlenv.engine.base import PauseMode, UpdateReport, WeightSender
from rlenv.engine.faces import EngineFaces
from rlenv.engine.settings import tokenizer_of
from rlenv.engine.transfer.update import WeightUpdater


class UpdatingEngine(EngineFaces):
    """`EngineFaces` on a `Control`: what it asks of its engine is said there; `_open` makes the `_updater`."""

    _updater: WeightUpdater

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of `model`."""
        return tokenizer_of(self.model)

    @property
    def weight_version(self) -> int:
        """The version of the weights that serve now."""
        return self._updater.version

    def _open_or_close(self) -> None:
        """Open the engine, or leave nothing of it."""
        try:
            self.start(self._open()).result()
        except BaseException:
            self.close()
            raise

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self.hold(mode, clear_cache)

    async def _resume(self) -> None:
        await self.release()

    async def _update_weights(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport:
        return await self._updater.update(sender, version, mode, clear_cache)

    async def _proven(self, labels: frozenset[str]) -> None:
        await self._updater.ledger.wait(labels)

    # ------------------------------------------------------------------ hooks, beside those of EngineFaces

    async def _open(self) -> None:
        raise NotImplementedError

    async def hold(self, mode: PauseMode, clear_cache: bool) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError
