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
def test_a_capture_that_was_taken_over_while_it_slept_ends_fenced(
    step: str, database: Database, tmp_path: Path
) -> None:
    shop = PostgresShop(database)
    shop.make_tables()
    old, new = (PostgresProcess(database, tmp_path, TABLES, name) for name in ("old", "new"))
    writer = Writer(shop, step)
    try:
        old.start(armed=f"{step}=sleep:8@5")
        old.wait_until_it_reads()
        writer.start()
        wait_for(lambda: is_asleep(old), "the capture to sleep at the failpoint")
        old.process.send_signal(signal.SIGSTOP)
        at_stop = old.durable()
        new.start("--takeover")
        wait_for(lambda: new.durable() > at_stop, "the new capture to go on")
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


def is_asleep(capture: PostgresProcess) -> bool:
    """Nothing became durable for a while, although the writers go on."""
    before = capture.durable()
    time.sleep(0.7)
    return capture.durable() == before > 0


def confirmed_lsn(database: Database) -> int:
    return Lsn.parse(database.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots"))
