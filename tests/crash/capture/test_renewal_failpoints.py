"""A kill at every durable step of a renewal: the next start ends it, once, and no change after it is missing."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import PostgresProcess, wait_for
from tests.crash.capture.postgres_shop import TABLES, PostgresShop, Transaction
from tests.sampled import SOAK
from tests.servers.postgres import Database

from headwater import failpoints
from headwater.capture import CapturedTable, SourceState, TableState, renewal, session
from headwater.control import request
from headwater.control.command import RecaptureTables
from headwater.control.request import Request, leave
from headwater.log_store import LogView, sealer
from headwater.sources.postgres import slot
from headwater.sources.postgres.offset import PostgresOffset
from headwater.state import board, open_reader
from headwater.state.engines import embedded

LOGS = tuple(f"public.{table}" for table in TABLES)
OF_SOURCE = (
    (board.AFTER_CREATE, 1),  # the request itself
    (sealer.BEFORE_SEAL, 1),  # the note that the source is about to be prepared anew
    (sealer.AFTER_SEAL, 1),
    (session.BEFORE_SOURCE, 1),
    (slot.SLOT_DROPPED, 1),
    (session.AFTER_SOURCE, 1),
    (sealer.BEFORE_SEAL, 2),  # all tables, the new place and the answer
    (embedded.SEAL_BEFORE_COMMIT, 2),
    (embedded.SEAL_AFTER_COMMIT, 2),
    (sealer.AFTER_SEAL, 2),
    (request.BEFORE_REMOVE, 1),  # the answer is sealed, and the request still there
)

DURABLE = ((embedded.SEAL_AFTER_COMMIT, 2), (sealer.AFTER_SEAL, 2), (request.BEFORE_REMOVE, 1))
OF_TABLES = ((renewal.INCLUDED, 1), (session.BEFORE_TABLES, 1), (session.AFTER_TABLES, 1))


def some(steps: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """By default those of a renewal; the steps of every seal and request are killed elsewhere, too."""
    return [(step, hit) for step, hit in steps if SOAK or step.startswith("renewal.")]


def test_every_step_of_a_renewal_has_a_crash_test() -> None:
    covered = {step for step, _ in (*OF_SOURCE, *OF_TABLES)}
    assert {name for name in failpoints.registered() if name.startswith("renewal.")} <= covered


def write(database: Database) -> list[int]:
    """A few transactions; their numbers."""
    confirmed = []
    with database.connect() as opened:
        for _ in range(4):
            with opened.transaction():
                transaction = Transaction(opened)
                transaction.insert_orders(20)
                transaction.insert_lines(5)
                transaction.update("orders", "amount = amount + 1", 5)
                confirmed.append(transaction.end())
            opened.execute("SELECT pg_sleep(0.06)")
    return confirmed


def captured(store: Path) -> dict[str, CapturedTable]:
    with open_reader(store) as reader, reader.snapshot() as view:
        return dict(SourceState.read(view)[1])


def places(store: Path) -> dict[str, str]:
    return {log: known.since.to_json() for log, known in captured(store).items()}


def changes_since(store: Path) -> dict[int, Counter[str]]:
    """How many changes of each table the logs have after their ``since``, by transaction."""
    tables = captured(store)
    found: dict[int, Counter[str]] = defaultdict(Counter)
    with open_reader(store) as reader, reader.snapshot() as view:
        for table, log in zip(TABLES, LOGS, strict=True):
            shown = LogView.open(view, log)
            positions = [
                position
                for batch in shown.read_range(0, shown.sealed)
                for position in batch.column("_position").to_pylist()
            ]
            assert len(positions) == len(set(positions)), "a change came twice"
            for position in positions:
                if PostgresOffset.from_position(position) >= tables[log].since:
                    found[int.from_bytes(position[-4:], "big")][table] += 1
    return found


def verify(database: Database, store: Path, after: list[int]) -> None:
    """All that was written *after* the renewal is in the logs, and whatever is there after ``since`` is whole."""
    entered = database.execute("SELECT xid, orders, lines FROM ledger")
    ledger = {xid: Counter(orders=orders, lines=lines, ledger=1) for xid, orders, lines in entered}
    found = changes_since(store)
    assert set(after) <= set(found)
    assert {xid: +counts for xid, counts in found.items()} == {xid: +ledger[xid] for xid in found}


@pytest.mark.parametrize(("step", "hit"), some(OF_SOURCE), ids=str)
def test_a_kill_while_the_source_is_prepared_anew(step: str, hit: int, database: Database, tmp_path: Path) -> None:
    PostgresShop(database).make_tables()
    capture = PostgresProcess(database, tmp_path, TABLES)
    try:
        capture.start()
        capture.wait_until_it_reads()
        write(database)
        capture.catch_up()
        capture.stop()
        before = places(capture.store)
        database.execute("SELECT pg_drop_replication_slot('headwater')")
        write(database)  # lost to the logs
        capture.start("--renew", armed=f"{step}=kill@{hit}")
        capture.killed_by_failpoint()
        killed = places(capture.store)
        assert (killed != before) == ((step, hit) in DURABLE)
        write(database)
        capture.start()
        wait_for(lambda: places(capture.store) != before, "the source to be prepared anew")
        capture.wait_until_it_reads()
        renewed = places(capture.store)
        assert set(renewed.values()).isdisjoint(before.values())
        assert len(set(renewed.values())) == 1
        assert killed in (before, renewed), "what is durable is not done again"
        after = write(database)
        capture.catch_up()
        capture.stop()
        capture.start()
        capture.wait_until_it_reads()
        after += write(database)
        capture.catch_up()
        capture.stop()
        assert places(capture.store) == renewed, "it is done once"
        verify(database, capture.store, after)
        assert database.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1
        assert capture.said == ""
    finally:
        capture.close()


ASKED = [
    (step, hit, asked)
    for step, hit in OF_TABLES
    for asked in (True, False)
    if SOAK or asked == (step == renewal.INCLUDED)
]


@pytest.mark.parametrize(("step", "hit", "asked"), ASKED, ids=str)
def test_a_kill_while_a_table_is_captured_anew(
    step: str, hit: int, asked: bool, database: Database, tmp_path: Path
) -> None:
    """Because somebody *asked* for it, or by itself: its key changed."""
    PostgresShop(database).make_tables()
    capture = PostgresProcess(database, tmp_path, TABLES)
    try:
        capture.start()
        capture.wait_until_it_reads()
        write(database)
        capture.catch_up()
        capture.stop()
        before = places(capture.store)
        database.execute("ALTER TABLE lines DROP CONSTRAINT lines_pkey", "ALTER TABLE lines ADD PRIMARY KEY (id)")
        write(database)
        if asked:
            leave(capture.store, Request(RecaptureTables(("lines",))))
        capture.start(armed=f"{step}=kill@{hit}")
        capture.killed_by_failpoint()
        killed = captured(capture.store)["public.lines"]
        write(database)
        capture.start()
        wait_for(lambda: is_renewed(capture, before["public.lines"]), "the table to be captured anew")
        renewed = places(capture.store)
        if step == session.AFTER_TABLES:
            assert killed.state is TableState.ACTIVE
            assert renewed["public.lines"] == killed.since.to_json(), "what is durable is not done again"
        assert renewed | {"public.lines": ""} == before | {"public.lines": ""}
        after = write(database)
        capture.catch_up()
        capture.stop()
        assert places(capture.store) == renewed
        assert {known.state for known in captured(capture.store).values()} == {TableState.ACTIVE}
        check_one(database, capture.store, after)
        assert capture.said == ""
    finally:
        capture.close()


def is_renewed(capture: PostgresProcess, before: str) -> bool:
    known = captured(capture.store)["public.lines"]
    return capture.runs() and known.state is TableState.ACTIVE and known.since.to_json() != before


def check_one(database: Database, store: Path, after: list[int]) -> None:
    """The renewed table is whole after its ``since``, and the others from their beginning."""
    entered = database.execute("SELECT xid, orders, lines FROM ledger")
    found = changes_since(store)
    assert {xid for xid, _, _ in entered} == set(found)
    for xid, orders, lines in entered:
        assert (found[xid]["orders"], found[xid]["ledger"]) == (orders, 1)
        assert found[xid]["lines"] in ((lines,) if xid in after else (lines, 0))
