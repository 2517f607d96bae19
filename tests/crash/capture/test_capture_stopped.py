"""A capture whose process is stopped (SIGSTOP) and taken over: when it goes on, it writes and acknowledges nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import SECONDS, PostgresProcess, wait_for
from tests.crash.capture.postgres_shop import TABLES, PostgresShop
from tests.crash.capture.shop import Writer, verify
from tests.servers.postgres import Database

from headwater.capture import session
from headwater.log_store import sealer
from headwater.sources.postgres.offset import Lsn


@pytest.mark.parametrize("step", [pytest.param(sealer.BEFORE_SEAL, marks=pytest.mark.soak), session.BEFORE_ACKNOWLEDGE])
def test_a_capture_that_was_taken_over_while_it_was_stopped_ends_fenced(
    step: str, database: Database, tmp_path: Path
) -> None:
    shop = PostgresShop(database)
    shop.make_tables()
    old, new = (PostgresProcess(database, tmp_path, TABLES, name) for name in ("old", "new"))
    writer = Writer(shop, step)
    try:
        old.start(armed=f"{step}=stop@5")
        old.wait_until_it_reads()
        writer.start()
        wait_for(lambda: old.runs() and is_stopped(old), "the capture to stop at the failpoint")
        at_stop = old.durable()
        new.start("--takeover")
        wait_for(lambda: new.runs() and new.durable() > at_stop, "the new capture to go on")
        old.process.send_signal(signal.SIGCONT)
        assert old.process.wait(SECONDS) == 1
        assert "was taken over by host" in old.said
        time.sleep(0.5)
        writer.end()
        assert confirmed_lsn(database) <= new.durable(), "the server may forget what is durable here, and no more"
        new.catch_up()
        new.stop()
        verify(shop, new.store, writer.confirmed)
        assert new.said == ""
    finally:
        old.close()
        new.close()


def is_stopped(capture: PostgresProcess) -> bool:
    status = Path(f"/proc/{capture.process.pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


def confirmed_lsn(database: Database) -> int:
    return Lsn.parse(database.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots"))
