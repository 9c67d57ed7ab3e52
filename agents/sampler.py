"""A `Sample` goes in, the plainest agent comes out: it asks for that sample on every turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlenv.rollout import Agent
from rlenv.types import Sample, View

# Makes an agent that samples in the given way: training, evaluation and greedy evaluation each name their own.
MakeAgent = Callable[[Sample], Agent]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples the whole transcript's continuation, whatever it is.

    >>> Sampler(Sample(temperature=0.0)).act(view)
    Sample(temperature=0.0, ...)
    """

    sample: Sample

    def act(self, view: View) -> Sample:
        return self.sample
