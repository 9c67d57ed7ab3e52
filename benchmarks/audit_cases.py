"""Plant one mistake after another and print what the audit blames: the table of its own correctness.

    python -m benchmarks.audit_cases --right 20 --out audit_cases.json

Each case is a backend with one thing wrong, or with none. It passes if the audit blames exactly that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlenv.agents.audit import AuditResult, audit_parts, learner_of
from rlenv.agents.audit_config import AuditConfig
from rlenv.agents.hardware import hardware, versions
from rlenv.agents.learner_types import Scoring
from rlenv.agents.probes import Probes
from rlenv.engine.backend import Backend
from rlenv.engine.vllm import VLLMEngine
from rlenv.models import default_model


@dataclass(frozen=True)
class Case:
    """A mistake, by name, in settings of an audit, and the causes that are to be blamed for it."""

    name: str
    blamed: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, model: str, tokens: int, seed: int = 0) -> AuditConfig:
        return AuditConfig(model=model, tokens=tokens, seed=seed, max_tokens=64, **self.settings)


RIGHT = Case("nothing", ())
RAW = Backend(logprobs="raw")
CASES = (
    Case("raw log-probs, temperature 0.6", ("raw log-probs",), {"temperature": 0.6, "backend": RAW}),
    Case("raw log-probs, top-p 0.8", ("top-p, top-k",), {"top_p": 0.8, "backend": RAW}),
    Case("top-p 0.8, whole vocabulary", ("learner's top-p, top-k",), {"top_p": 0.8, "scoring": Scoring(support=False)}),
    Case("top-k 20, whole vocabulary", ("learner's top-p, top-k",), {"top_k": 20, "scoring": Scoring(support=False)}),
    Case(
        "no temperature, sampled at 0.6",
        ("learner's temperature",),
        {"temperature": 0.6, "scoring": Scoring(temperature=False)},
    ),
    Case("bf16 head in the engine alone", ("output head",), {"backend": Backend(head="bfloat16", proof=False)}),
    Case("bf16 head in the learner alone", ("learner's output head",), {"scoring": Scoring(head="bfloat16")}),
    Case(
        "stale prefix cache",
        ("stale prefix cache",),
        {"pause": "wait", "clear_cache": False, "backend": Backend(salted=False, proof=False)},
    ),
    Case("stale keys and values", ("stale keys and values",), {"clear_cache": False}),
)
STARTED = ("logprobs", "head")  # what an engine decides at its start


def audited(engine: VLLMEngine, config: AuditConfig) -> AuditResult:
    """Audit `engine` as if it had been started with `config.backend`, as far as that can be changed later."""
    assert all(getattr(engine.backend, name) == getattr(config.backend, name) for name in STARTED)
    before = engine.salted, engine.proof
    learner = learner_of(config, engine)

    async def run() -> AuditResult:
        engine.proof = config.backend.proof
        await Probes(engine, learner).update("keep", True)
        engine.salted = config.backend.salted
        return await audit_parts(engine, learner, config)

    try:
        return asyncio.run(run())
    finally:
        engine.salted, engine.proof = before


def by_engine(cases: Sequence[Case]) -> dict[Backend, list[Case]]:
    """Cases that one engine can serve, by its backend at the start."""
    groups: dict[Backend, list[Case]] = {}
    for case in cases:
        backend = replace(case.settings.get("backend", Backend()), salted=True, proof=True)
        groups.setdefault(backend, []).append(case)
    return groups


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.audit_cases", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--tokens", type=int, default=500, help="ids sampled for each case")
    parser.add_argument("--right", type=int, default=20, help="audits of a right backend, seeds 0, 1, …")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", help="where the JSON goes")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    runs = [(case, 0) for case in CASES] + [(RIGHT, seed) for seed in range(arguments.right)]
    for backend, cases in by_engine([*CASES, RIGHT]).items():
        with VLLMEngine(arguments.model, device=arguments.device, backend=backend) as engine:
            for case, seed in runs:
                if case in cases:
                    rows.append(_row(case, audited(engine, case.config(arguments.model, arguments.tokens, seed)), seed))
    wrong = [row for row in rows if row["blamed"] != row["expected"]]
    print(f"{'FAIL' if wrong else 'PASS'}: {len(rows) - len(wrong)} of {len(rows)} as expected")
    if arguments.out:
        result = {
            "rows": rows,
            "passed": not wrong,
            "model": Path(arguments.model).name,
            "hardware": hardware(arguments.device),
            "versions": versions(),
        }
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if wrong else 0


def _row(case: Case, result: AuditResult, seed: int) -> dict[str, Any]:
    figures = {finding.cause: asdict(finding.here) for finding in result.blamed if finding.here is not None}
    row = {
        "planted": case.name,
        "seed": seed,
        "expected": list(case.blamed),
        "blamed": list(figures),
        "figures": figures,
        "overall": asdict(result.verdict.mismatch),
    }
    size = ", ".join(f"{name}: mean |Δ| {gap['abs_mean']:.2g}, k3 {gap['kl']:.2g}" for name, gap in figures.items())
    print(f"{case.name:34s} {size or 'nothing blamed'} (overall max |Δ| {result.verdict.mismatch.abs_max:.2g})")
    return row


if __name__ == "__main__":
    sys.exit(main())
