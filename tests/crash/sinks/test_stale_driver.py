"""A process that slept while another one took over commits nothing when it wakes up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.crash.sinks.coordinated import deliver, look, stop_and_go_on
from tests.crash.sinks.matrix import EXACT, PROCESSES, Matrix, found_by, run
from tests.db.sinks.cases import Case, Servers
from tests.sampled import share

INSIDE = {
    "delta": "sink.delta.before_commit",
    "iceberg": "sink.iceberg.before_commit",
    "kafka": "sink.kafka.before_commit",
    "mysql": "sink.sql.before_commit",
    "parquet": "sink.parquet.before_manifest",
    "postgres": "sink.sql.before_commit",
    "table": "versioned.before_manifest",
}
"""Where the commit at the sink is under way."""
NUMBER = 3
"""Of the batch before which, or in which, it stops: a large one."""
READ_AGAIN = 7
"""Of the batch that a recovery does not commit but drops: what it replaces only its source can tell."""
STEPS = ["delivery.before_pending", "delivery.after_pending", "inside", "delivery.before_committed"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Servers() as servers:
        yield Matrix(servers, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(
    ("case", "step"),
    [(case, step) for place, case in enumerate(share(EXACT, 1, 3)) for step in share(STEPS, place, len(STEPS))],
    ids=str,
)
def test_a_process_that_was_taken_over_commits_nothing(case: Case, step: str, matrix: Matrix) -> None:
    armed = INSIDE[case.kind] if step == "inside" else step
    with matrix.place(case) as delivery:
        stale = replace(delivery, armed=f"{armed}@{NUMBER}", output=f"{delivery.output}-stale")
        process = PROCESSES.Process(target=stop_and_go_on, args=(stale,))
        process.start()
        assert process.pid is not None
        try:
            wait_until_stopped(process.pid)
            _, taken_over = found_by(replace(delivery, generation=2))
            os.kill(process.pid, signal.SIGCONT)
            process.join(60)
        finally:
            process.kill()
            process.join()
        assert process.exitcode == 0
        assert Path(stale.output).read_text().partition(":")[0] in ("SinkFenced", "StagedLost")
        _, after = found_by(replace(delivery, generation=2), look)
        assert after == taken_over
        assert after.problem(case.mode, taken_over) is None


@pytest.mark.parametrize("case", share(EXACT, 0, 8), ids=str)
def test_a_commit_that_sleeps_while_a_recovery_drops_its_batch_does_no_harm(case: Case, matrix: Matrix) -> None:
    with matrix.place(case) as delivery:
        _, clean = found_by(delivery)
    with matrix.place(case) as delivery:
        stale = replace(delivery, armed=f"{INSIDE[case.kind]}@{READ_AGAIN}", output=f"{delivery.output}-stale")
        process = PROCESSES.Process(target=stop_and_go_on, args=(stale,))
        process.start()
        assert process.pid is not None
        try:
            wait_until_stopped(process.pid)
            assert run(deliver, replace(delivery, generation=2, upto=0)) == 0
            os.kill(process.pid, signal.SIGCONT)
            process.join(60)
        finally:
            process.kill()
            process.join()
        _, after = found_by(replace(delivery, generation=3))
        assert after.problem(case.mode, clean) is None


def wait_until_stopped(pid: int) -> None:
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.01)
