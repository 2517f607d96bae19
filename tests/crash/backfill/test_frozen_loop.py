"""A delivery loop that is frozen between stage and commit while another one takes over: it commits nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.crash.sinks.matrix import PROCESSES, wait_until_stopped
from tests.here import Here
from tests.written_log import options, write

from headwater import failpoints
from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.errors import FencedError
from headwater.sinks import coordinator
from headwater.sinks.delivery import DeliveryRecord, read_deliveries
from headwater.sinks.open import open_sink

pytestmark = pytest.mark.crash


def deliver(folder: Path, armed: str = "") -> None:
    """All that there is; how it ended is in a file."""
    failpoints.arm(armed)
    delivery = Delivery(options(str(folder / "store")), open_sink("delta", path=str(folder / "lake"), mode="changes"))
    ended = ""
    try:
        with DeliveryLoop(delivery, Here()) as loop:
            while loop.plan(0.0):
                loop.deliver()
    except FencedError as error:
        ended = type(error).__name__
    (folder / "ended").write_text(ended)


def delivered(folder: Path) -> tuple[int, list[int], list[DeliveryRecord]]:
    """The version of the sink's table, its rows, and the batches that are known."""
    table = DeltaTable(folder / "lake" / "main.t")
    rows = sorted(table.to_pyarrow_table(columns=["id"])["id"].to_pylist())
    return table.version(), rows, list(read_deliveries(options(str(folder / "store")).state_location, "mirror"))


@pytest.mark.parametrize(
    "step", [coordinator.BEFORE_PENDING, coordinator.AFTER_PENDING, "sink.delta.before_commit"], ids=str
)
def test_a_loop_that_another_one_took_over_from_commits_nothing_when_it_goes_on(step: str, tmp_path: Path) -> None:
    for number in range(2):
        write(str(tmp_path / "store"), number)
    frozen = PROCESSES.Process(target=deliver, args=(tmp_path, f"{step}=stop@2"))  # in its second batch
    frozen.start()
    try:
        assert frozen.pid is not None
        wait_until_stopped(frozen.pid)
        assert delivered(tmp_path)[1] == list(range(10))
        write(str(tmp_path / "store"), 2)
        deliver(tmp_path)
        assert (tmp_path / "ended").read_text() == ""
        before = delivered(tmp_path)
        assert before[1] == list(range(30))
        os.kill(frozen.pid, signal.SIGCONT)
        frozen.join(60)
        assert frozen.exitcode == 0
    finally:
        frozen.kill()
        frozen.join()
    assert (tmp_path / "ended").read_text() in ("SinkFenced", "WriterFenced")
    assert delivered(tmp_path) == before
