"""The demo is a test: a kill -9 in the middle, and nothing lost or doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from headwater.cli.main import run; run()", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_demo_delivers_exactly_once_over_a_kill_and_leaves_nothing_running(tmp_path: Path) -> None:
    done = demo("--seconds", "4", "--json", "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == 1
    assert summary["rows"] > 0
    assert [summary[key] for key in ("lost", "doubled", "reader_lost", "reader_doubled", "journal_damages")] == [0] * 5
    assert summary["journal_gaps"] <= 1
    assert summary["reader_rows"] == summary["rows"]
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    again = demo("--keep", str(tmp_path / "kept"))
    assert again.returncode == 1
    assert "not empty" in again.stderr
