"""Mutated binlogs: the decoders refuse them with our errors, give the same rows, and never hang or crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECORDED = sorted((ROOT / "tests" / "fixtures" / "binlog").glob("*.bin"))
SECONDS = 120 if os.environ.get("HEADWATER_SOAK") else 5


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("seed", [1])
def test_mutated_binlogs_are_refused_with_our_errors_and_never_end_the_process(seed: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.property.sources.binlog_fuzz", str(seed), str(SECONDS), *map(str, RECORDED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS + 45,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    counts = dict(pair.split("=") for pair in run.stdout.split())
    assert int(counts["files"]) > 10
    assert int(counts["refused"]) > 10
    assert int(counts["rows"]) > 100
