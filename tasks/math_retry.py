"""An arithmetic problem goes in; a wrong first answer is told so and may be mended once, for half the reward."""

from __future__ import annotations

from rlenv.env import Turn
from rlenv.tasks.math import MathEnv, boxed_integer


class MathRetryEnv(MathEnv):
    """Two turns: 1.0 for a right first answer, 0.5 for a right second one."""

    def turn(self, action: str) -> Turn:
        right = boxed_integer(action) == self.answer
        if self.turns == 1 and not right:
            return Turn(observation="That is not right. Try once more.", terminated=False)
        return Turn(float(right) if self.turns == 1 else right / 2)
