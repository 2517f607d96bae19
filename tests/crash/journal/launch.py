"""Start the children of :mod:`tests.crash.journal.children`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SOAK = os.environ.get("HEADWATER_SOAK") == "1"


def start(*arguments: object, failpoints: str = "") -> subprocess.Popen[str]:
    """A child process with its stdout as a pipe."""
    environment = {**os.environ, "HEADWATER_FAILPOINTS": failpoints, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.crash.journal.children", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(child: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for *child*, check how it ended, and return what it printed."""
    out, err = child.communicate(timeout=120)
    assert child.returncode == code, f"ended with {child.returncode}: {err[-2000:]}"
    return out
