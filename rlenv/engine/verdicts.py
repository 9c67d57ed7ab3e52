"""Labels go in, verdicts come out: tokens pass once their engine has proven their weights and the group committed them.

Two engines may give one label to different weights (the first attempt at version 5 may hold on one and fail on the
other), so in a group every label names its engine, and the verdict is that engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator

from rlenv.engine.members import Member, label_in_group
from rlenv.engine.transfer.proof import Ledger
from rlenv.errors import EngineDeadError, WeightUpdateError
from rlenv.types import version_of


class Verdicts:
    """What may pass in a group whose engines all serve `version`, proven. Belongs to one event loop."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._rolling: int | None = None  # the version of the update under way
        self._known: set[str] = set()  # labels in the ledger
        self._asking: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._ledger = Ledger(self._next_label())

    async def wait(self, labels: Iterable[str]) -> None:
        """Return once each label is proven and committed; raises WeightUpdateError if one never will be."""
        await self._ledger.wait(labels)

    def lose(self, error: EngineDeadError) -> None:
        """The group died: what is open can never be proven."""
        self._ledger.lose(error)

    def meet(self, member: Member, label: str) -> None:
        """Ask an engine for its verdict on a label of its own, the first time that the group meets it."""
        name = label_in_group(label, member.number)
        if name not in self._known:
            self._known.add(name)
            self._ledger.open(name)
            task = asyncio.create_task(self._ask(member, label, name))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    @contextlib.contextmanager
    def rolling(self, version: int) -> Iterator[None]:
        """An update to `version`, which is committed if the block ends without an error."""
        self._rolling = version
        try:
            yield
            self.version = version
        finally:
            self._rolling = None
            self._change.set()
            self._change = asyncio.Event()

    def committed_label(self) -> str:
        """The group's own label for its last commit, `"5"` or `"5#2"`; completions carry those of the engines."""
        label = self._next_label()
        self._ledger.open(label)
        self._ledger.prove(label)
        return label

    async def _ask(self, member: Member, label: str, name: str) -> None:
        answer = await member.answer(member.engine.proven([label]))
        error = None if answer is None else answer.exception()
        if isinstance(error, WeightUpdateError):
            self._ledger.refute(name, error)
        elif answer is None or error is not None:
            self._refute(name, f"engine {member.number} ended before it had proven weights {label!r}")
        else:
            await self._commit_of(version_of(label), name)

    async def _commit_of(self, version: int, name: str) -> None:
        while self.version < version == self._rolling:
            await self._change.wait()
        if self.version < version:
            self._refute(name, f"weights of version {version} were not proven by every engine of the group")
        else:
            self._ledger.prove(name)

    def _refute(self, name: str, how: str) -> None:
        self._ledger.refute(name, WeightUpdateError(how, version=version_of(name), what="commit", size=0.0))

    def _next_label(self) -> str:
        attempts = (f"{self.version}#{attempt}" for attempt in itertools.count(2))
        label = next(name for name in itertools.chain([str(self.version)], attempts) if name not in self._known)
        self._known.add(label)
        return label
