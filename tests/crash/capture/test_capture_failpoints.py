"""A kill at every durable step of a capture, and the next start gives what no kill would have given."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from tests.crash.capture.capture_process import PostgresProcess
from tests.crash.capture.postgres_shop import TABLES, PostgresShop, Transaction
from tests.crash.capture.shop import verify
from tests.sampled import SOAK, share
from tests.servers.postgres import Database

from headwater import failpoints
from headwater.capture import session
from headwater.log_store import buffer, sealer
from headwater.log_store import state as log_state
from headwater.state.engines import claim, embedded

START, FLOWING, LARGE = "before the first change", "changes flow", "a large epoch"
STEPS = (
    # failpoint, which time it is passed, and when that is
    (claim.OPEN_BEFORE_COMMIT, 1, START),
    (session.BEFORE_BEGIN, 1, START),
    (session.AFTER_BEGIN, 1, START),
    (log_state.BEFORE_DISCARD, 2, START),
    (sealer.BEFORE_SEAL, 1, START),  # the first seal says that the source is about to be prepared, the second its place
    (sealer.AFTER_SEAL, 1, START),
    (sealer.BEFORE_SEAL, 2, START),
    (sealer.AFTER_SEAL, 2, START),
    (sealer.BEFORE_SEAL, 3, FLOWING),
    (embedded.SEAL_BEGUN, 3, FLOWING),
    (embedded.SEAL_BEFORE_COMMIT, 3, FLOWING),
    (embedded.SEAL_AFTER_COMMIT, 3, FLOWING),
    (session.BEFORE_ACKNOWLEDGE, 1, FLOWING),
    (session.AFTER_ACKNOWLEDGE, 3, FLOWING),
    (buffer.BEFORE_STAGE, 1, LARGE),
    (embedded.STAGE_BEFORE_COMMIT, 4, LARGE),  # at the start each of the three logs stages that it discards
    (buffer.AFTER_STAGE, 1, LARGE),
)
SOME_STEPS = [one for one in STEPS if SOAK or one[0].startswith("capture.") or one in share(STEPS, 0, 6)]
"""Those of capture; the steps of every seal are killed elsewhere, too."""


def test_every_durable_step_of_capture_has_a_crash_test() -> None:
    covered = {step for step, _, _ in STEPS}
    assert {name for name in failpoints.registered() if name.startswith("capture.")} <= covered
    of_a_writer = {buffer.BEFORE_STAGE, buffer.AFTER_STAGE, sealer.BEFORE_SEAL, sealer.AFTER_SEAL}
    assert of_a_writer | {log_state.BEFORE_DISCARD} <= covered


def write(database: Database, *, large: bool) -> list[int]:
    """Transactions of every kind but a truncation, apart in time so that they fall into several epochs."""
    confirmed = []
    with database.connect() as opened:
        for number in range(4):
            with opened.transaction():
                transaction = Transaction(opened)
                transaction.insert_orders(20)
                transaction.insert_lines(5)
                if number == 1:
                    transaction.update("orders", "amount = amount + 1", 5)
                    transaction.change_keys("orders", 11)
                    transaction.delete("lines", 7)
                if number == 2:
                    transaction.insert_orders(3000)
                confirmed.append(transaction.end())
            opened.execute("SELECT pg_sleep(0.06)")
        if large:
            confirmed.append(_write_much(opened))
    return confirmed


def _write_much(opened: psycopg.Connection[tuple[object, ...]]) -> int:
    with opened.transaction():
        transaction = Transaction(opened)
        row = "nextval('ids'), 1, repeat(md5(i::text), 32768)"
        transaction.changes["lines"] += transaction.run(f"INSERT INTO lines SELECT {row} FROM generate_series(1, 40) i")
        return transaction.end()


@pytest.mark.parametrize(("step", "hit", "when"), SOME_STEPS, ids=[f"{step}@{hit}" for step, hit, _ in SOME_STEPS])
def test_a_kill_at_a_durable_step_loses_and_repeats_nothing(
    step: str, hit: int, when: str, database: Database, tmp_path: Path
) -> None:
    shop = PostgresShop(database)
    shop.make_tables()
    capture = PostgresProcess(database, tmp_path, TABLES)
    confirmed: list[int] = []
    try:
        capture.start(armed=f"{step}=kill@{hit}")
        if when != START:
            capture.wait_until_it_reads()
            confirmed += write(database, large=when == LARGE)
            while capture.process.poll() is None:
                confirmed += write(database, large=False)
        capture.killed_by_failpoint()
        if database.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'headwater'"):
            confirmed += write(database, large=False)
        capture.start()
        capture.wait_until_it_reads()
        confirmed += write(database, large=False)
        capture.catch_up()
        capture.stop()
        assert verify(shop, capture.store, confirmed) == len(confirmed)
        assert capture.said == ""
    finally:
        capture.close()
