"""What a doctor found at a source: each finding with what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # good to know
    WARNING = "warning"  # works now, and may stop or slow down
    PROBLEM = "problem"  # capture cannot start, or would miss changes


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    :ivar check: what, in one or two words, the same in every run.
    :ivar table: the table that it is about, if it is about one.
    :ivar fix: the statement that mends it; what is no statement begins with ``--``.
    """

    check: str
    level: Level
    text: str
    fix: str | None = None
    table: str | None = None


def statement_of(next_step: str | None) -> str | None:
    """The *fix* of a finding, from the next step of an error."""
    if next_step is None:
        return None
    return next_step.removeprefix("Run: ") if next_step.startswith("Run: ") else f"-- {next_step}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about one source.

    :ivar source: its address without the password.
    """

    source: str
    version: str | None
    findings: Sequence[Finding] = field(default_factory=tuple)

    @property
    def is_healthy(self) -> bool:
        """No finding is a problem."""
        return all(finding.level is not Level.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        findings = [
            {
                "check": finding.check,
                "level": finding.level.value,
                "table": finding.table,
                "text": finding.text,
                "fix": finding.fix,
            }
            for finding in self.findings
        ]
        return {"source": self.source, "version": self.version, "healthy": self.is_healthy, "findings": findings}
