"""The demo is a test: history and live changes through a kill -9, every row compared, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

COMMAND = [sys.executable, "-c", "from headwater.cli.main import run; run()", "demo"]
SMALL = ("--rows", "20000", "--seconds", "5")


def start(temporary: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A demo whose temporary files are all in *temporary*."""
    temporary.mkdir()
    temporary.chmod(0o755)
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)} | environment,
    )


def ended(process: subprocess.Popen[str], code: int) -> list[str]:
    """What it printed, when it has ended with *code*."""
    try:
        out, err = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == code, err
    return out.splitlines() or [err]


def left_in(folder: Path) -> list[str]:
    """Processes that name *folder*, or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                told = (entry / "cmdline").read_text().replace("\0", " ")
                if str(folder) in told or str(folder) in str((entry / "cwd").readlink()):
                    found.append(told)
            except OSError:
                continue
    return found


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory that the server's user can enter, whatever other test sessions do to pytest's own."""
    with tempfile.TemporaryDirectory(prefix="headwater-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made) / "t"


def test_the_demo_mirrors_every_row_over_a_kill_and_leaves_nothing_behind(temporary: Path) -> None:
    lines = ended(start(temporary, *SMALL, "--json"), 0)
    summary: dict[str, Any] = json.loads(lines[-1])
    assert summary["source_rows"] == summary["sink_rows"] > 20_000
    assert [summary[key] for key in ("mismatches", "lost", "extra", "doubled", "unsettled")] == [0] * 5
    assert summary["kills"] == 1
    assert summary["recovery_seconds"] > 0
    assert summary["changes"] > summary["transactions"] > 0
    assert summary["latency_p99_ms"] >= summary["latency_p50_ms"] > 0
    assert summary["backfill_rows"] >= 20_000
    assert summary["backfill_rows_per_second"] > 0
    assert summary["wal_held_max_bytes"] > 0
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.soak
def test_the_demo_mirrors_every_row_of_a_mariadb(temporary: Path) -> None:
    lines = ended(start(temporary, "--source", "mariadb", *SMALL, "--json"), 0)
    summary: dict[str, Any] = json.loads(lines[-1])
    assert summary["source_rows"] == summary["sink_rows"] > 20_000
    assert [summary[key] for key in ("mismatches", "lost", "extra", "doubled", "unsettled")] == [0] * 5
    assert summary["kills"] == 1
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.soak
def test_a_demo_whose_mirror_was_spoiled_says_so(temporary: Path) -> None:
    lines = ended(start(temporary, *SMALL, "--json", HEADWATER_DEMO_SPOIL="1"), 1)
    summary: dict[str, Any] = json.loads(lines[-1])
    assert (summary["mismatches"], summary["lost"], summary["extra"], summary["doubled"]) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("number", "sign", "times"),
    [
        (signal.SIGINT, "store/run/run.lock", 3),
        pytest.param(signal.SIGTERM, "lake/public.orders/_delta_log", 1, marks=pytest.mark.soak),
    ],
)
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    temporary: Path, number: signal.Signals, sign: str, times: int
) -> None:
    """At the very beginning, by somebody who cannot wait, and while Spark is at work."""
    process = start(temporary, *SMALL)
    deadline = time.monotonic() + 400
    while not list(temporary.glob(f"headwater-demo-*/{sign}")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.5)
    ended(process, 130)
    assert left_in(temporary) == []
    assert list(temporary.iterdir()) == []


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run([*COMMAND, "--keep", str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "not empty" in done.stderr
