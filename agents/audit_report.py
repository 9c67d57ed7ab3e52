"""The result of an audit enters; a table for people, JSON for programs and a plot leave."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlenv.agents.audit import AuditResult, Finding
from rlenv.agents.hardware import hardware, versions
from rlenv.agents.mismatch import Mismatch

EXPLAINED = 1e-10  # the least k3 that is drawn


def show(result: AuditResult, console: Console) -> None:
    """Print the table and the verdict."""
    console.print(_overall(result.verdict.mismatch, result.dtype))
    console.print(_table(result))
    console.print(_verdict(result))


def write(result: AuditResult, folder: Path) -> None:
    """Write audit.json and audit.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(as_dict(result), indent=2) + "\n")
    _plot(result, folder / "audit.png")


def as_dict(result: AuditResult) -> dict[str, Any]:
    """The result in plain types, with what it was measured on."""
    return {
        "passed": result.passed,
        "blamed": [finding.cause for finding in result.blamed],
        "dtype": result.dtype,
        "mismatch": asdict(result.verdict.mismatch),
        "findings": [asdict(finding) for finding in result.findings],
        "settings": asdict(result.config),
        "hardware": hardware(result.device),
        "versions": versions(),
    }


def _overall(mismatch: Mismatch, dtype: str) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_row("engine − learner at equal weights", f"{mismatch.tokens} sampled ids, {dtype}")
    table.add_row("mean offset, mean and max |Δ|", " ".join(_short(getattr(mismatch, n)) for n in _NATS) + " nats")
    table.add_row("mean ratio, k3 KL", f"{mismatch.ratio_mean:.6f}  {_short(mismatch.kl)} nats")
    shares = f"{mismatch.clip_fraction:.2%}  {mismatch.ess:.4f}  {mismatch.entropy:.3f} nats"
    table.add_row("clip fraction, effective sample size, entropy", shares)
    return table


_NATS = ("offset", "abs_mean", "abs_max")


def _table(result: AuditResult) -> Table:
    table = Table("layer", "cause", box=None, header_style="bold")
    for column in ("k3 here", "max |Δ|", "k3 if wrong", "max |Δ|"):
        table.add_column(column, justify="right")
    layer = ""
    for finding in sorted(result.findings, key=lambda finding: _LAYERS.index(finding.layer)):
        figures = [*_figures(finding.here), *_figures(finding.alone)]
        style = "bold red" if finding.blamed else ""
        table.add_row(
            finding.layer if finding.layer != layer else "", finding.cause, *figures, finding.mend, style=style
        )
        layer = finding.layer
    return table


_LAYERS = ("semantic", "inference path", "objective")


def _figures(mismatch: Mismatch | None) -> tuple[str, str]:
    return ("", "") if mismatch is None else (_short(mismatch.kl), _short(mismatch.abs_max))


def _verdict(result: AuditResult) -> RenderableType:
    if result.passed:
        return Text("passed: numerics explain what is left", style="bold green")
    causes = result.verdict.causes
    lines = [str(cause) for cause in causes]
    lines += [
        f"{finding.cause}: max |Δ| {_short(finding.here.abs_max)} nats; {finding.mend}"
        for finding in result.blamed
        if finding.here is not None and finding.cause not in {cause.name for cause in causes}
    ]
    return Group(Text("FAILED", style="bold red"), *(Text(line) for line in lines))


def _plot(result: AuditResult, path: Path) -> None:
    from matplotlib.figure import Figure

    rows: list[tuple[Finding, str, Mismatch]] = [
        (finding, where, mismatch)
        for finding in result.findings
        for where, mismatch in (("here", finding.here), ("wrong alone", finding.alone))
        if mismatch is not None
    ]
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colours = {"here": "tab:blue", "wrong alone": "tab:grey"}
    for place, (finding, where, mismatch) in enumerate(reversed(rows)):
        colour = "tab:red" if finding.blamed and where == "here" else colours[where]
        axes.barh(place, max(mismatch.kl, EXPLAINED), color=colour)
    axes.set_yticks(range(len(rows)), [f"{finding.cause} ({where})" for finding, where, _ in reversed(rows)])
    axes.set(xscale="log", xlabel="k3 KL, nats", title="What each cause of mismatch costs")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _short(value: float) -> str:
    return f"{value:.1e}"
