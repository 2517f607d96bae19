"""The demo is a test: a kill -9 in the middle, and nothing lost or doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from headwater.cli.main import run; run()", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_demo_captures_every_change_once_over_a_kill_and_leaves_nothing_running(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = demo("--seconds", "4", "--json", "--keep", str(kept))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["kills"] == 1
    assert summary["transactions"] > 0
    assert summary["changes"] > summary["source_rows"] == summary["replayed_rows"] > 0
    assert [summary[key] for key in ("mismatches", "lost", "extra", "doubled")] == [0] * 4
    assert summary["latency_p99_ms"] >= summary["latency_p50_ms"] > 0
    left = subprocess.run(["pgrep", "-f", str(kept)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    again = demo("--keep", str(kept))
    assert again.returncode == 1
    assert "not empty" in again.stderr
