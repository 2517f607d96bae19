"""A capture that is killed at random while it goes on after gaps, under live writers.

``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it 30 rounds.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from tests.crash.capture.capture_process import PostgresProcess, wait_for
from tests.crash.capture.postgres_shop import TABLES, PostgresShop
from tests.crash.capture.rounds import seeded
from tests.crash.capture.shop import Writer
from tests.crash.capture.test_renewal_failpoints import captured, write
from tests.sampled import SOAK
from tests.servers.postgres import Database

from headwater.capture import TableState
from headwater.capture.renewal import renew
from headwater.control.request import ANSWERS, INBOX
from headwater.log_store import LogView
from headwater.sources.postgres.offset import PostgresOffset
from headwater.state import Catalog, open_reader
from headwater.state.board import open_board

ROUNDS = 30 if SOAK else 5


@pytest.mark.timeout(900)
def test_a_capture_that_is_killed_at_random_while_it_is_renewed_misses_nothing_after_it(
    database: Database, tmp_path: Path
) -> None:
    seed, rng = seeded()
    shop = PostgresShop(database)
    shop.make_tables()
    capture = PostgresProcess(database, tmp_path, TABLES)
    writer = Writer(shop, seed)
    try:
        capture.start()
        capture.wait_until_it_reads()
        writer.start()
        for _ in range(ROUNDS):
            capture.kill9()
            if rng.random() < 0.6:
                wait_for(lambda: drop_slot(database), "the slot to be free")
                assert renew(capture.store, None)
            else:
                assert renew(capture.store, rng.sample(TABLES, rng.randint(1, 3)))
            capture.start()
            time.sleep(rng.uniform(0.3, 3.0))
        capture.kill9()
        capture.start()
        wait_for(lambda: capture.runs() and not unanswered(capture.store), "all requests to be done")
        time.sleep(1.0)
        capture.kill9()
        writer.end()
        capture.start()
        after = write(database)
        capture.catch_up()
        capture.stop()
        assert {known.state for known in captured(capture.store).values()} == {TableState.ACTIVE}
        assert verify(database, capture.store) >= set(after)
        assert capture.said == ""
    finally:
        capture.close()


def drop_slot(database: Database) -> bool:
    """Whether it could be dropped: the server may not have noticed yet that its reader is gone."""
    query = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = 'headwater'"
    try:
        database.execute(query)
    except psycopg.errors.ObjectInUse:
        return False
    return True


def unanswered(store: Path) -> set[str]:
    asked = {name.removeprefix(f"{INBOX}/") for name in open_board(str(store)).list(INBOX)}
    with open_reader(store) as reader, reader.snapshot() as view:
        return asked - {key[0] for key, _ in Catalog.load(view).open(ANSWERS).scan(view, 0)}


def verify(database: Database, store: Path) -> set[int]:
    """Each log has all changes after its ``since``, once: of every transaction that any log tells of; those of all."""
    entered = database.execute("SELECT xid, orders, lines FROM ledger")
    ledger = {xid: Counter(orders=orders, lines=lines, ledger=1) for xid, orders, lines in entered}
    positions = {table: _positions(store, f"public.{table}") for table in TABLES}
    commits = {
        _xid(position): PostgresOffset.from_position(position) for table in TABLES for position in positions[table]
    }
    whole = set(commits)
    for table in TABLES:
        told = positions[table]
        assert len(told) == len(set(told)), f"{table}: a change came twice"
        since = captured(store)[f"public.{table}"].since
        found = Counter(map(_xid, told))
        complete = {xid for xid, place in commits.items() if place >= since}
        assert {xid: found[xid] for xid in complete} == {xid: ledger[xid][table] for xid in complete}, table
        whole &= complete
    return whole


def _positions(store: Path, log: str) -> list[bytes]:
    with open_reader(store) as reader, reader.snapshot() as view:
        shown = LogView.open(view, log)
        batches = list(shown.read_range(0, shown.sealed))
    return [position for batch in batches for position in batch.column("_position").to_pylist()]


def _xid(position: bytes) -> int:
    return int.from_bytes(position[-4:], "big")
