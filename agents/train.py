"""The arguments of `rlenv train` go in, from a launcher: `accelerate launch -m rlenv.agents.train math-v0 --steps 200`.

The launched process is the rollout host; Accelerate's settings reach the learner's process through the environment.
"""

from __future__ import annotations

import os
import sys

from rlenv.agents.cli import main as command


def main() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        print(
            f"rlenv: {ranks} processes were launched and the learner is one: type accelerate launch --num_processes 1",
            file=sys.stderr,
        )
        return 2
    return command(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
