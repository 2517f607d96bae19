"""A stream that is killed at any durable step and started again is written once, batch by batch, and leaves nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.crash.spark import written_batches
from tests.sampled import hits as hits_of
from tests.sampled import share
from tests.spark.driven_writer import epochs, logged, staged

from headwater.failpoints import registered

pytestmark = pytest.mark.crash

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.crash.spark.written_batches"])

ALL_STEPS = (
    "stream_log.before_part",
    "stream_log.after_part",
    "stream_log.before_commit",
    "state.embedded.seal_before_commit",
    "stream_log.after_commit",
    "stream_log.before_clean",
    "stream_log.after_clean",
)
DRIVER_STEPS = share(ALL_STEPS, 1, 3)
"""A start of Spark for each."""


def run(target: Callable[..., None], *arguments: str) -> int:
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def contents(folder: Path) -> list[tuple[object, ...]]:
    return logged(folder, "id", "_row_id")


def test_killed_at_any_step(tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    assert run(written_batches.count_hits, str(clean)) == 0
    hits: dict[str, int] = json.loads((clean / "hits.json").read_text())
    assert {name for name in registered() if name.startswith("stream_log.")} <= set(hits)
    keys = [key for number in range(4) for part in written_batches.rows_of(number) for key, _ in part]
    expected = [("insert", key, place) for place, key in enumerate(keys, 1)]
    assert contents(clean) == expected
    for place, (name, count) in enumerate(sorted(hits.items())):
        for at in hits_of(count, place):
            folder = tmp_path / f"{name}-{at}"
            assert run(written_batches.child, str(folder), f"{name}=kill@{at}") == -signal.SIGKILL, (name, at)
            assert run(written_batches.child, str(folder), "") == 0, (name, at)
            assert contents(folder) == expected, (name, at)
            assert epochs(folder) == [5] * written_batches.BATCHES, (name, at)
            assert staged(folder) == [], (name, at)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_at_each_step_goes_on(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(len(DRIVER_STEPS) + 1):
        path = tmp_path / "in" / f"{number}.json"
        path.write_text("\n".join(json.dumps({"id": 10 * number + place}) for place in range(10)))
        os.utime(path, (number + 1, number + 1))
    for step in DRIVER_STEPS:
        assert drive(tmp_path, step) == -signal.SIGKILL, step
    assert drive(tmp_path, "") == 0
    rows = contents(tmp_path)
    assert sorted(row[1] for row in rows) == list(range(10 * (len(DRIVER_STEPS) + 1)))  # type: ignore[type-var]
    assert [row[2] for row in rows] == list(range(1, len(rows) + 1))
    assert [int(row[1]) // 10 for row in rows] == sorted(int(row[1]) // 10 for row in rows)  # type: ignore[call-overload]
    assert epochs(tmp_path) == [10] * (len(DRIVER_STEPS) + 1)
    assert staged(tmp_path) == []


def drive(folder: Path, step: str) -> int:
    """Start the driver, to be killed at *step*; how it ended."""
    repository = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.crash.spark.killed_driver", str(folder), step]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with (folder / "driver.log").open("ab") as log:
        return subprocess.run(
            command, cwd=repository, env=environment, stdout=log, stderr=log, timeout=120, check=False
        ).returncode
