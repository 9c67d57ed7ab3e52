"""The agent library: a task and a model go in, a better model comes out.

    AsyncAgent("math-v0", model="path/to/model").train(steps=200)

Importing it loads neither torch nor vLLM.
"""

from rlenv.agents.agent import AsyncAgent
from rlenv.agents.config import TrainConfig
from rlenv.agents.report import RunResult
from rlenv.agents.sampler import Sampler
from rlenv.rollout import Agent

__all__ = ["Agent", "AsyncAgent", "RunResult", "Sampler", "TrainConfig"]
