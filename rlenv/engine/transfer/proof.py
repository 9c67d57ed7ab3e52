"""Was that update the one the trainer sent? Fingerprints and canaries go in, a verdict by value comes out.

Two parts, as neither suffices. Fingerprints prove that every value arrived; canaries prove that the engine computes
with them. A skipped tensor can move log-probabilities by less than the noise of a dtype, and equal fingerprints
cannot see a stale key-value cache.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlenv.engine.base import Manifest, TensorDigest
from rlenv.errors import EngineDeadError, EngineError, WeightUpdateError

# The largest |Δ log-prob| that numerics alone explain. In fp32, engine and learner differ by a few 1e-6. In half
# precision single tokens differ by up to 0.6 nats, so there the mean is judged; fingerprints see what it cannot.
MAX_ABS_FP32 = 1e-4
MEAN_ABS_HALF = 0.15

WeightRows = dict[str, list[list[Any]]]  # what a worker's `rlenv_weights` returns


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """What the engine computed for one canary: `ids` [n], and log-probs of the last `len(logprobs)` of them."""

    kind: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """|engine − learner| in nats over all canary tokens, and the canary that was furthest off."""

    mean: float
    max: float
    worst: str


class Ledger:
    """Which weight labels are proven, refuted or still open."""

    def __init__(self, first: str) -> None:
        self._verdicts: dict[str, asyncio.Future[None]] = {}
        self.open(first)
        self.prove(first)

    def open(self, label: str) -> None:
        self._verdicts[label] = asyncio.get_running_loop().create_future()

    def prove(self, label: str) -> None:
        verdict = self._verdicts[label]
        if not verdict.done():  # a death may have come first
            verdict.set_result(None)

    def lose(self, error: EngineDeadError) -> None:
        """The engine died: what is open can never be proven."""
        for label in self._verdicts:
            self.refute(label, error)

    def refute(self, label: str, error: EngineError) -> None:
        verdict = self._verdicts[label]
        if not verdict.done():
            verdict.set_exception(error)
            verdict.exception()  # nobody may be waiting; that is no reason to warn

    async def wait(self, labels: Iterable[str]) -> None:
        """Return once each label is proven.

        Raises WeightUpdateError if one is refuted or was never announced, EngineDeadError if its proof was cut short.
        """
        for label in sorted(labels):
            if label not in self._verdicts:
                raise WeightUpdateError(
                    f"tokens carry the weight label {label!r}, which no update announced",
                    version=-1,
                    what="label",
                    size=0.0,
                )
            await asyncio.shield(self._verdicts[label])


def canary_prompt(vocabulary: int, length: int, forbidden: Iterable[int] = ()) -> list[int]:
    """Ids [length] that never change: unlikely text, whose log-probs are sensitive to every tensor."""
    draw = random.Random(0)
    usable = [i for i in range(vocabulary) if i not in set(forbidden)]
    return [draw.choice(usable) for _ in range(length)]


def check_fingerprints(version: int, manifest: Manifest, workers: Sequence[WeightRows], constants: WeightRows) -> None:
    """Every tensor that was sent is held by each worker, bit for bit, and the rest has not changed.

    Raises WeightUpdateError naming the tensor.
    """
    fixed = {(row[0], row[1]): row[2:] for row in constants["constant"]}
    for rows in workers:
        for name, how in differences(manifest, rows):
            raise _refuted(version, name, how)
        for name, held_as, *digest in rows["constant"]:
            if fixed.get((name, held_as)) != digest:
                raise _refuted(version, name, f"{held_as} comes from no checkpoint, yet it changed")


def differences(manifest: Manifest, rows: WeightRows, given: str = "sent") -> Iterator[tuple[str, str]]:
    """Tensors of `manifest`, which was `given`, that a worker does not hold bit for bit, or holds besides; and how."""
    covered = set()
    for name, held_as, dtype, shape, value in rows["checkpoint"]:
        covered.add(name)
        held = TensorDigest(dtype, tuple(shape), value)
        if name not in manifest:
            yield name, f"the engine's {held_as} was not {given}"
        elif held != manifest[name]:
            yield name, _difference(held_as, held, manifest[name], given)
    for name in manifest.keys() - covered:
        yield name, f"it was {given}, but the engine holds no such tensor"


def check_canaries(
    version: int, results: Sequence[CanaryResult], reference: Sequence[Sequence[float]], dtype: str
) -> Mismatch:
    """Engine against learner on the same ids under the same weights.

    `reference` holds the learner's log-probs [n - 1] for each result's ids [n]. Raises WeightUpdateError naming
    the canary and the size in nats.
    """
    all_gaps: list[float] = []
    worst, worst_gap = "", -1.0
    for result, full in zip(results, reference, strict=True):
        expected = full[len(full) - len(result.logprobs) :]
        gaps = [abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)]
        gap = max((math.inf if math.isnan(g) else g for g in gaps), default=0.0)
        if gap > worst_gap:
            worst, worst_gap = result.kind, gap
        all_gaps += gaps
    mean = sum(all_gaps) / max(len(all_gaps), 1)
    judged, limit, of = (worst_gap, MAX_ABS_FP32, "max") if dtype == "float32" else (mean, MEAN_ABS_HALF, "mean")
    if not judged <= limit:
        raise WeightUpdateError(
            f"weights of version {version} do not compute as the learner's do: {of} |Δ log-prob| is {judged:.3g} nats "
            f"on the {worst} canary, and {limit:g} is the limit for {dtype}",
            version=version,
            what=f"{worst} canary",
            size=judged,
        )
    return Mismatch(mean, worst_gap, worst)


def _difference(held_as: str, held: TensorDigest, expected: TensorDigest, given: str) -> str:
    if held.shape != expected.shape:
        return f"the engine's {held_as} has shape {list(held.shape)}, {list(expected.shape)} was {given}"
    if held.dtype != expected.dtype:
        return f"the engine's {held_as} is {held.dtype}, {expected.dtype} was {given}"
    return f"the values of the engine's {held_as} are not those that were {given}"


def _refuted(version: int, name: str, how: str) -> WeightUpdateError:
    return WeightUpdateError(
        f"weights of version {version} were not delivered: {name}: {how}", version=version, what=name, size=math.inf
    )
