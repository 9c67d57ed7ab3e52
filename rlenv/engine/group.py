"""Independent engines go in, one engine comes out: it balances load, and commits weights once all have proven them.

    request ─ least outstanding tokens → engine ─ completion, its labels naming the engine → caller
                    ▲──── another one, if that engine fails ────┘
    update ── engine 0: pause · transfer · resume · prove ── engine 1: … ── commit ── engines that had failed catch up

An update rolls from engine to engine: while one stands still the others generate, and one that hangs holds up the
commit, not the generation. Versions stay exact, as each span carries the label of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rlenv.engine.base import Engine, PauseMode, UpdateReport, WeightSender
from rlenv.engine.faces import EngineFaces
from rlenv.engine.members import Member, NoSender, NoWeightsYet, Request, WatchedSender, combined, in_group
from rlenv.engine.verdicts import Verdicts
from rlenv.errors import ConfigError, EngineDeadError, EngineError, WeightUpdateError
from rlenv.types import Completion, Sample

T = TypeVar("T")
MAX_LOSSES = 3  # a request that so many engines failed under is not given to another


class EngineGroup(EngineFaces):
    """Several engines of one model behind one contract; the group owns them and closes them.

    A request goes to the engine with the fewest outstanding tokens, each turn of an episode anew: a turn that changes
    engines is computed from its first token there, as the prefix cache of its last turn stays behind.

    `weight_version` is the version that all serving engines have proven; in the midst of an update some already serve
    the next one, and `proven` waits for the commit. An update that ends without a commit takes engines that it had
    reached out of service, so that only the committed version is served.

    An engine that fails is in quarantine: its requests go to others, it is started again at once, and it serves again
    once an update has brought it to the committed version; only then is it known which version a sender's weights are.
    With no engine left, calls raise EngineDeadError, until a `restart`, which starts again only what does not answer.

    An engine may take `answer_s` seconds over a pause, a resume or an abort, and `update_s` over an update and its
    proof. Raises ConfigError for no engines, or engines that differ in model, dtype or weight version.
    """

    def __init__(self, engines: Sequence[Engine], *, answer_s: float = 30.0, update_s: float = 120.0) -> None:
        for what, values in (
            ("model", {engine.model for engine in engines}),
            ("dtype", {engine.dtype for engine in engines}),
            ("weight version", {engine.weight_version for engine in engines}),
        ):
            if len(values) != 1:
                raise ConfigError(f"a group needs engines of one {what}, not {sorted(values, key=str) or 'none'}")
        super().__init__(engines[0].model, min(engine.max_model_len for engine in engines))
        self.engines = tuple(engines)
        self.dtype = engines[0].dtype
        self.quarantined: dict[int, str] = {}  # number of an engine out of service → why
        self._answer_s, self._update_s = answer_s, update_s
        self._members = [Member(engine, number, engine.weight_version) for number, engine in enumerate(engines)]
        self._updating = asyncio.Lock()
        self.start(self._open()).result()

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer of `model`."""
        return self.engines[0].tokenizer

    @property
    def weight_version(self) -> int:
        """The version that all serving engines have proven."""
        return self._verdicts.version

    async def _open(self) -> None:
        self._verdicts = Verdicts(self.engines[0].weight_version)

    # ------------------------------------------------------------------ requests

    async def _generate(self, prompt: tuple[int, ...], sample: Sample, request_id: str | None) -> Completion:
        room = self.max_model_len - len(prompt)
        longest = len(prompt) + min(sample.max_tokens or room, room)
        request = Request(prompt, sample, request_id or "request", longest)
        while True:
            member = self._next_member(request)
            member.take(request)
            try:
                completion = await self._ask(member, request)
            finally:
                member.give_back(request)
            if completion is not None:
                return completion
            if request.aborted:
                return request.abandoned()

    def _next_member(self, request: Request) -> Member:
        serving = [member for member in self._in("serving") if member.number not in request.refused_by]
        if not serving or request.losses == MAX_LOSSES:
            raise EngineDeadError(
                f"no engine of the group of {self.model!r} is in service"
                if not serving
                else f"request {request.name!r} was lost with {MAX_LOSSES} engines of the group of {self.model!r}"
            )
        free = [member for member in serving if not member.updating] or serving
        return min(free, key=lambda member: (member.outstanding, member.number))

    async def _ask(self, member: Member, request: Request) -> Completion | None:
        """One engine's completion; None when another engine is to be asked."""
        version, failures = member.version, member.failures
        call = member.engine.generate(request.prompt, request.sample, request_id=request.name)
        answer = await member.answer(call)
        if answer is None:
            request.losses += member.failures > failures
            return None
        error = answer.exception()
        if isinstance(error, WeightUpdateError) and len(request.refused_by) + 1 < len(self._in("serving")):
            request.refused_by.add(member.number)
            return None
        if isinstance(error, EngineError) and not isinstance(error, WeightUpdateError):
            request.losses += 1
            self._quarantine(member, failures, f"failed a request: {error}")
            return None
        completion = answer.result()
        if any(span.version < version for span in completion.spans):
            self._quarantine(member, failures, f"had proven version {version} and serves an older one")
            return None
        if completion.finish_reason == "abort" and not request.aborted:
            return None  # its engine dropped everything, because an update of it failed
        for label in completion.labels:
            self._verdicts.meet(member, label)
        return in_group(completion, member.number)

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        self._want_aborted(self._members, request_ids)
        await self._everywhere("abort", lambda engine: engine.abort(request_ids), self._answer_s)

    def _want_aborted(self, members: Sequence[Member], request_ids: frozenset[str] | None = None) -> None:
        for request in itertools.chain.from_iterable(member.requests for member in members):
            request.aborted |= request_ids is None or request.name in request_ids

    # ------------------------------------------------------------------ pause and resume

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "abort":
            self._want_aborted(self._members)
        seconds = None if mode == "wait" else self._answer_s  # requests may take as long as they need
        await self._everywhere("pause", lambda engine: engine.pause(mode, clear_cache=clear_cache), seconds)

    async def _resume(self) -> None:
        await self._everywhere("resume", lambda engine: engine.resume(), self._answer_s)

    async def _is_paused(self) -> bool:
        return all(await self._everywhere("answer", lambda engine: engine.is_paused(), self._answer_s))

    async def _everywhere(self, what: str, call: Callable[[Engine], Awaitable[T]], seconds: float | None) -> list[T]:
        """What every serving engine answers; one that does not is put in quarantine. Raises what a setting earned."""
        members = {member: member.failures for member in self._in("serving")}
        answers = await asyncio.gather(*(member.answer(call(member.engine), seconds) for member in members))
        results = []
        for (member, failures), answer in zip(members.items(), answers, strict=True):
            error = None if answer is None else answer.exception()
            if isinstance(error, ConfigError):
                raise error
            if answer is not None and error is None:
                results.append(answer.result())
            else:
                self._quarantine(member, failures, f"did not {what}: {error or 'no answer'}")
        if not results:
            raise EngineDeadError(f"no engine of the group of {self.model!r} is in service")
        return results

    # ------------------------------------------------------------------ weights

    async def _update_weights(
        self, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport:
        async with self._updating:
            if version < self.weight_version:
                raise ConfigError(f"weight version {version} is older than {self.weight_version}, which serves now")
            in_flight = self.in_flight
            members = self._in("serving") or self._in("ready")
            reports = await self._roll(members, sender, version, mode, clear_cache)
            await self._catch_up(sender, version)
            return combined(self._verdicts.committed_label(), in_flight, reports)

    async def _roll(
        self, members: list[Member], sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> list[UpdateReport]:
        """Update one after the other, and commit: all that are left serve `version`, proven, or none of them does."""
        proven: dict[Member, UpdateReport] = {}
        failed: dict[Member, EngineError] = {}
        failures = {member: member.failures for member in members}
        try:
            with self._verdicts.rolling(version):
                for member in members:
                    if member.failures > failures[member]:
                        continue  # it failed while it waited for its turn
                    outcome = await self._update(member, sender, version, mode, clear_cache)
                    if isinstance(outcome, UpdateReport):
                        proven[member] = outcome
                    else:
                        failed[member] = outcome
                proven = {member: report for member, report in proven.items() if member.failures == failures[member]}
                if not proven:
                    raise _first(list(failed.values()), self.model)
        except BaseException:
            for member in proven:
                if member.failures == failures[member]:
                    self._withdraw(member, f"holds version {version}, which was not committed")
            raise
        for member, error in failed.items():
            self._quarantine(member, failures[member], str(error))
        for member in proven:
            self._serve(member)
        return list(proven.values())

    async def _update(
        self, member: Member, sender: WeightSender, version: int, mode: PauseMode, clear_cache: bool
    ) -> UpdateReport | EngineError:
        """Update one engine. Returns what was wrong with the engine, raises what was wrong with the trainer's side."""
        watched, failures = WatchedSender(sender), member.failures
        if mode == "abort":
            self._want_aborted([member])
        member.updating = True
        try:
            call = member.engine.update_weights(watched, version, mode=mode, clear_cache=clear_cache)
            answer = await member.answer(call, self._update_s)
        except asyncio.CancelledError:
            self._quarantine(member, failures, f"was given up half way to version {version}")
            raise
        finally:
            member.updating, watched.over = False, True
        if answer is None and member.failures == failures:
            self._quarantine(member, failures, f"took over {self._update_s:g} s to version {version}")
            if watched.busy:
                raise _undelivered(version, f"the sender took over {self._update_s:g} s")
        if answer is None:
            return EngineDeadError(f"engine {member.number} {self.quarantined[member.number]}")
        error = answer.exception()
        if isinstance(error, WeightUpdateError):
            return error
        if error is not None and error is not watched.error and not isinstance(error, ConfigError):
            self._quarantine(member, failures, f"failed on the way to version {version}: {error}")
            return error if isinstance(error, EngineError) else EngineError(str(error))
        report = answer.result()
        member.version = version
        self._verdicts.meet(member, report.label)
        return report

    async def _catch_up(self, sender: WeightSender, version: int) -> None:
        """Bring engines that run again to the committed version."""
        for member in self._in("ready"):
            if member.engine.weight_version > version:
                continue
            failures = member.failures
            outcome = await self._update(member, sender, version, "keep", True)
            if not isinstance(outcome, UpdateReport):
                self._quarantine(member, failures, str(outcome))
            elif member.failures == failures:
                self._serve(member)

    async def _proven(self, labels: frozenset[str]) -> None:
        await self._verdicts.wait(labels)

    # ------------------------------------------------------------------ life cycle

    def _in(self, state: str) -> list[Member]:
        return [member for member in self._members if member.state == state]

    def _serve(self, member: Member) -> None:
        member.state = "serving"
        self.quarantined.pop(member.number, None)

    def _withdraw(self, member: Member, why: str) -> None:
        """Take a running engine out of service until the next update; what it was asked is asked of others."""
        member.state = "ready"
        self.quarantined[member.number] = why
        member.give_up()

    def _quarantine(self, member: Member, failures: int, why: str) -> None:
        """Take an engine out of service and start it again, unless that was done since it had so many failures."""
        if member.failures > failures:
            return
        member.failures += 1
        member.state = "down"
        self.quarantined[member.number] = why
        member.give_up()
        member.restart = asyncio.create_task(self._bring_back(member))
        if not self._in("serving") and not self._restarting.locked():
            self.die(f"lost its last engine, engine {member.number}, which {why}")

    async def _bring_back(self, member: Member) -> None:
        try:
            await member.engine.restart(NoSender())
        except NoWeightsYet:
            member.state = "ready"
        except Exception as error:  # whatever keeps it from starting: the others go on
            self.quarantined[member.number] += f", and did not start again: {error}"

    def _is_dead(self) -> bool:
        return False  # the quarantine of the last engine tells

    def _died(self, error: EngineDeadError) -> None:
        self._verdicts.lose(error)

    async def _start_again(self) -> None:
        for member in [*self._in("serving"), *self._in("ready")]:
            answer = await member.answer(member.engine.is_paused(), self._answer_s)
            if answer is None or answer.exception() is not None:
                self._quarantine(member, member.failures, "did not answer")
            else:
                self._withdraw(member, "waits for its weights")
        for member in self._in("down"):
            if member.restart is None or member.restart.done():
                member.restart = asyncio.create_task(self._bring_back(member))
        await asyncio.gather(*(member.restart for member in self._in("down") if member.restart is not None))
        if not self._in("ready"):
            raise EngineError(f"no engine of the group of {self.model!r} started again: {self.quarantined}")

    async def _close(self) -> None:
        for member in self._members:
            if member.restart is not None:
                member.restart.cancel()
            member.engine.close()


def _first(errors: Sequence[EngineError], model: str) -> EngineError:
    """What to tell of an update that no engine took: rather that weights were refused than that an engine died."""
    refused = [error for error in errors if isinstance(error, WeightUpdateError)]
    lost = EngineDeadError(f"no engine of the group of {model!r} is in service")
    return next(iter([*refused, *errors, lost]))


def _undelivered(version: int, how: str) -> WeightUpdateError:
    message = f"weights of version {version} were not delivered: {how}"
    return WeightUpdateError(message, version=version, what="transfer", size=0.0)
