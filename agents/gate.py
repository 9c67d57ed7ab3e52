"""A run's own engine and learner enter before the first update; a verdict leaves, or an AuditError that says why not.

A short audit of the very parts that will train: some rollouts of the run's agent on the run's task, at equal weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Protocol

from rlenv.agents.advantages import score
from rlenv.agents.diagnosis import Verdict, diagnose
from rlenv.agents.learner_types import Scoring
from rlenv.agents.packing import Batch, FloatArray, pack
from rlenv.errors import AuditError
from rlenv.types import Group

Rollout = Callable[[int, int], Awaitable[Group]]  # (group id, seed of its task) → the finished group
MAX_TOKENS = 64  # of one answer
ENOUGH_TOKENS = 512
GROUPS, MOST_GROUPS = 4, 32
FIRST_ID = 2**31  # of groups, so that sampling repeats nothing that is trained on


class Scorer(Protocol):
    """What an audit needs of a learner: its own `scoring`, and log-probs by any."""

    scoring: Scoring

    async def score(self, batch: Batch, scoring: Scoring | None = None) -> FloatArray: ...


async def audit(rollout: Rollout, learner: Scorer, *, seed: int, version: int, dtype: str) -> Verdict | None:
    """Sample at the weights of `version`, which both sides hold, and compare. None when nothing could be sampled."""
    groups: list[Group] = []
    while _tokens(groups) < ENOUGH_TOKENS and len(groups) < MOST_GROUPS:
        ids = range(FIRST_ID + len(groups), FIRST_ID + len(groups) + GROUPS)
        groups += await asyncio.gather(*(rollout(id, (seed + id) % 2**32) for id in ids))
    if not any(len(group.trajectories) > 1 for group in groups) or not _tokens(groups):
        return None
    return await diagnose(pack(score(groups), version=version), learner.score, learner.scoring, dtype)


def passage(verdict: Verdict | None, *, force: bool) -> dict[str, Any]:
    """The audit as `summary.json` tells it. Raises AuditError when it failed, unless it is forced."""
    if verdict is None:
        return {"passed": None, "forced": force}
    if not verdict.passed and not force:
        raise AuditError(
            "engine and learner do not agree at equal weights. "
            + " · ".join(map(str, verdict.causes))
            + " · To train all the same, type --force"
        )
    causes = [{"name": cause.name, "how": cause.how, "mend": cause.mend} for cause in verdict.causes]
    return {"passed": verdict.passed, "forced": force, "causes": causes, **asdict(verdict.mismatch)}


def _tokens(groups: list[Group]) -> int:
    return sum(sum(row.loss_mask) for group in groups if len(group.trajectories) > 1 for row in group.trajectories)
