"""The audit on the real engine: each planted mistake is named as its own cause, and a right backend never is."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console

from benchmarks.audit_cases import CASES, RAW, RIGHT, Case, audited, by_engine
from benchmarks.faults import FaultyEngine
from rlenv.agents import audit as audit_module
from rlenv.agents import audit_report
from rlenv.agents.audit import AuditResult
from rlenv.agents.audit_config import AuditConfig
from rlenv.agents.cli import main
from rlenv.engine.backend import Backend
from rlenv.engine.vllm import VLLMEngine
from rlenv.errors import ConfigError
from rlenv.models import default_model

pytestmark = pytest.mark.engine
GROUPS = by_engine(CASES)


@pytest.fixture(autouse=True)
def _own_accelerator_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def blamed(engine: VLLMEngine, case: Case, seed: int = 0) -> AuditResult:
    result = audited(engine, case.config(default_model(), tokens=500, seed=seed))
    assert [finding.cause for finding in result.blamed] == list(case.blamed)
    assert result.passed == (not case.blamed)
    return result


@pytest.mark.parametrize("case", GROUPS[Backend()], ids=lambda case: case.name)
def test_a_planted_mistake_is_named(vllm_engine: FaultyEngine, case: Case) -> None:
    result = blamed(vllm_engine, case)
    assert all(finding.here is not None and finding.here.abs_max > 1e-3 for finding in result.blamed)


def test_raw_log_probs_are_named() -> None:
    with VLLMEngine(default_model(), device="cpu", max_model_len=256, backend=RAW) as engine:
        for case in GROUPS[RAW]:
            assert blamed(engine, case).verdict.mismatch.abs_mean > 1e-2


@pytest.mark.parametrize("seed", range(3))
def test_a_right_backend_is_never_blamed(vllm_engine: FaultyEngine, seed: int, tmp_path: Path) -> None:
    result = blamed(vllm_engine, RIGHT, seed)
    assert result.verdict.mismatch.abs_max <= 1e-4
    costs = {finding.cause: finding.alone for finding in result.findings if finding.alone is not None}
    assert costs["stale prefix cache"].abs_max > 1e-2 and costs["stale keys and values"].abs_max > 1e-2
    staleness = next(finding for finding in result.findings if finding.layer == "objective")
    assert staleness.here is not None and staleness.here.abs_max > 1e-4 and not staleness.blamed
    assert vllm_engine.weight_version > 0 and vllm_engine.salted and vllm_engine.proof
    audit_report.write(result, tmp_path)
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["passed"] is True and written["mismatch"]["tokens"] >= 500
    assert (tmp_path / "audit.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 20}], ids=["temperature", "top-p", "top-k"]
)
def test_engine_and_learner_score_the_distribution_that_was_sampled(
    vllm_engine: FaultyEngine, settings: dict[str, float]
) -> None:
    mismatch = blamed(vllm_engine, Case("nothing", (), settings)).verdict.mismatch
    assert mismatch.tokens >= 500 and abs(mismatch.ratio_mean - 1) <= 1e-4 and mismatch.abs_max <= 1e-3


def test_the_table_is_read_at_eighty_columns(vllm_engine: FaultyEngine) -> None:
    console = Console(width=80, file=sys.stderr, record=True)
    audit_report.show(blamed(vllm_engine, CASES[4]), console)
    text = console.export_text()
    assert "FAILED" in text and "learner's temperature: the learner does not divide its logits by it" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_command_tells_what_it_does_and_writes_what_it_found(
    vllm_engine: FaultyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blamed(vllm_engine, RIGHT)  # leaves the shipped weights on the engine that is shared
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(audit_module, "VLLMEngine", lambda *_, **__: contextlib.nullcontext(vllm_engine))
    assert main(["audit", "--tokens", "300", "--max-tokens", "32", "--out", str(tmp_path)]) == 0
    output, told = capsys.readouterr()
    assert "passed: numerics explain what is left" in output
    phases = ["starting the engine", "sampling 300 ids on math-v0", "a weight update under requests in flight"]
    places = [told.find(phase) for phase in phases]
    assert places == sorted(places) and -1 not in places
    assert json.loads((tmp_path / "audit.json").read_text())["settings"]["tokens"] == 300


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"tokens": 0}, {"max_tokens": 0}])
def test_settings_that_cannot_be_audited_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--"):
        AuditConfig(**settings)
