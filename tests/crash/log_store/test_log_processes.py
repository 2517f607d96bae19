"""A log's writer and four consumers in processes of their own, with ``kill -9`` of any of them at any time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = "tests.crash.log_store.log_processes"
SECONDS = 60 if "HEADWATER_SOAK" in os.environ else 5


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("engine", "log_format", "seconds"), [("embedded", 2, SECONDS), ("embedded", 1, SECONDS), ("slatedb", 2, SECONDS)]
)
def test_every_row_is_delivered_exactly_once_to_each_consumer_whoever_is_killed(
    engine: str, log_format: int, seconds: int, tmp_path: Path
) -> None:
    result = run(engine, log_format, seconds, tmp_path / "first")
    if not result["gone"]:  # a busy machine did not come to that in so short a time
        result = run(engine, log_format, 8 * seconds, tmp_path / "second")
    assert result["gone"] > 0, "what all have delivered is forgotten"


def run(engine: str, log_format: int, seconds: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    location = str(folder / "store") if engine == "embedded" else f"slatedb+file://{folder}/store"
    command = [sys.executable, "-m", SCRIPT, location, str(folder), str(seconds), "20261115", str(log_format)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["wrong"] == [], result
    assert result["failed"] == 0, done.stderr
    assert result["kills"] >= 5
    assert result["rows"] > 0
    return result
