"""Mutated documents: the decoders refuse them with our errors, give the same columns, and never hang or crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.sampled import SOAK

ROOT = Path(__file__).parents[3]
SECONDS = 120 if SOAK else 4


@pytest.mark.timeout(SECONDS + 60)
def test_mutated_documents_are_refused_with_our_errors_and_never_end_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.property.sources.documents_fuzz", "1", str(SECONDS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS + 45,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    counts = dict(pair.split("=") for pair in run.stdout.split())
    assert int(counts["batches"]) > 20
    assert int(counts["refused"]) > 10
    assert int(counts["rows"]) > 20
