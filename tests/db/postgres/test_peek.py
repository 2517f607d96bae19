"""A slot that is read by SQL: the same messages as by the replication protocol, none missing and none twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.db.postgres.slots import (
    PUBLICATION,
    QUOTED,
    SLOT,
    Reopened,
    commits,
    confirmed,
    end_of_commit,
    eventually,
    inserted,
    kind,
    kinds,
    opened,
    published,
    read_until,
)
from tests.servers.postgres import Database, PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.sources.errors import SlotBusy, SlotLost, SlotMoved, SourceError, SourceNotFound, SourceUnreachable
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.offset import Lsn
from headwater.sources.postgres.peek import PeekStream

StartPostgres = Callable[..., PostgresServer]


def peeked(database: Database, start: int = 0, **options: object) -> PeekStream:
    options = {"interval": 0.02, **options}
    return PeekStream.open(Dsn(database.socket_dsn), SLOT, [PUBLICATION], start, **options)  # type: ignore[arg-type]


def ids(messages: list[bytes]) -> list[int]:
    return [inserted(message) for message in messages if kind(message) == "I"]


def wal_end(database: Database) -> int:
    return Lsn.parse(database.value("SELECT pg_current_wal_flush_lsn()::text"))


def comparable(messages: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Messages without their time; and what describes a table has no position in the stream."""
    return [(b"" if kind(message) in "RY" else message[1:17], message[25:]) for message in messages]


def test_the_messages_are_those_of_the_stream(postgres: Database) -> None:
    published(
        postgres,
        "CREATE TABLE full_rows (a int, b text, c timestamptz, d float8, e bytea, f interval)",
        "ALTER TABLE full_rows REPLICA IDENTITY FULL",
        f"ALTER PUBLICATION {QUOTED} ADD TABLE full_rows",
        "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 500) g",
        "UPDATE t SET v = 'w' WHERE id % 3 = 0",
        "UPDATE t SET id = id + 1000 WHERE id % 100 = 0",
        "DELETE FROM t WHERE id % 7 = 0",
        "SELECT pg_logical_emit_message(false, 'mark', 'outside')",
        "SELECT pg_logical_emit_message(true, 'mark', 'inside')",
        "INSERT INTO full_rows VALUES (1, 'ä', '2024-01-01 00:00+02', 1/3.0, '\\x00ff', '1 month 3 days')",
        "UPDATE full_rows SET b = NULL",
        "ALTER TABLE t ADD COLUMN more int DEFAULT 5",
        "INSERT INTO t VALUES (5000, 'new', 6)",
        "TRUNCATE t, full_rows",
        "DO $$ BEGIN INSERT INTO t VALUES (6000); RAISE division_by_zero; EXCEPTION WHEN OTHERS THEN NULL; END $$",
        "INSERT INTO t VALUES (7000, 'last')",
    )

    def last(messages: list[bytes]) -> bool:
        return ids(messages)[-1:] == [7000] and kind(messages[-1]) == "C"

    with opened(postgres, streaming=False) as stream:
        by_stream = read_until(stream, last)
    eventually(lambda: postgres.value("SELECT active FROM pg_replication_slots") is False)
    with peeked(postgres) as peek:
        by_peek = read_until(peek, last)
    assert comparable(by_peek) == comparable(by_stream)
    assert {"B", "R", "I", "U", "D", "T", "M", "C"} <= set(kinds(by_peek))


def test_100k_changes_come_once_in_several_peeks_while_nothing_is_acknowledged(postgres: Database) -> None:
    published(postgres)
    with postgres.connect() as session:
        for start in range(0, 100_000, 500):
            session.execute(
                "INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(%s::int, %s::int) g", [start, start + 499]
            )
    before = confirmed(postgres)
    with peeked(postgres, changes=30_000) as stream:
        messages = read_until(stream, commits(200), max_messages=7000)
        assert ids(messages) == list(range(100_000))
        assert stream.read(10, 1000, 0.1) == []
        assert stream.server_wal_end >= end_of_commit(messages[-1])
        assert stream.bytes_received == sum(map(len, messages))
    assert confirmed(postgres) == before


def test_many_small_peeks_with_and_without_acknowledging(postgres: Database) -> None:
    """A peek that holds only what was handed out before looks further, and one after an acknowledgement does not."""
    published(postgres)
    seen: list[int] = []
    with peeked(postgres, changes=5) as stream:
        for number in range(0, 120, 4):
            for one in range(number, number + 4):
                postgres.execute(f"INSERT INTO t VALUES ({one}, 'a')")
            # the transaction that ends makes the server flush the message that stands outside of it
            postgres.execute(f"SELECT pg_logical_emit_message(false, 'mark', '{number}'), pg_current_xact_id()")
            messages = read_until(stream, lambda messages: kinds(messages).endswith("M"))
            assert kinds(messages).count("M") == 1
            seen += ids(messages)
            if number % 32 == 0:
                ends = [end_of_commit(message) for message in messages if kind(message) == "C"]
                stream.acknowledge(ends[1])
    assert seen == list(range(120))


def test_what_was_acknowledged_moves_the_slot_and_is_not_given_again(postgres: Database) -> None:
    published(postgres, *(f"INSERT INTO t VALUES ({number}, 'a')" for number in range(10)))
    before = confirmed(postgres)
    with peeked(postgres) as stream:
        messages = read_until(stream, commits(10))
        assert confirmed(postgres) == before
        ends = [end_of_commit(message) for message in messages if kind(message) == "C"]
        stream.acknowledge(ends[3])
        stream.acknowledge(ends[1])
        eventually(lambda: confirmed(postgres) == ends[3], stream)
        stream.acknowledge(ends[4])
    assert confirmed(postgres) == ends[4], "closing tells what was acknowledged"
    with peeked(postgres, ends[4]) as stream:
        assert ids(read_until(stream, commits(5))) == [5, 6, 7, 8, 9]
    with peeked(postgres, ends[6]) as stream:
        assert ids(read_until(stream, commits(3))) == [7, 8, 9]


def test_an_idle_database_releases_the_log_of_others(postgres: Database) -> None:
    published(postgres, "CREATE TABLE unrelated (id int)")
    with peeked(postgres) as stream:
        for _ in range(3):
            postgres.execute("INSERT INTO unrelated SELECT generate_series(1, 1000)")
            end = wal_end(postgres)
            eventually(lambda end=end: stream.server_wal_end >= end, stream)  # type: ignore[misc]
            stream.acknowledge(stream.server_wal_end)
            eventually(lambda end=end: confirmed(postgres) >= end, stream)  # type: ignore[misc]


def test_a_transaction_larger_than_a_batch_is_handed_out_in_pieces(newest_postgres: Database) -> None:
    published(newest_postgres, "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g")
    with peeked(newest_postgres, changes=10) as stream:
        messages: list[bytes] = []
        while kinds(messages[-1:]) != "C":
            batch = stream.read(1000, 50_000, 5.0)
            assert len(batch) <= 1000
            assert sum(map(len, batch[:-1])) < 50_000
            messages += batch
            stream.acknowledge(stream.server_wal_end)
        assert ids(messages) == list(range(1, 20_001))
        stream.acknowledge(end_of_commit(messages[-1]))
        eventually(lambda: confirmed(newest_postgres) >= end_of_commit(messages[-1]), stream)


def test_reading_waits_no_longer_than_asked(newest_postgres: Database) -> None:
    published(newest_postgres)
    with peeked(newest_postgres) as stream:
        eventually(lambda: stream.server_wal_end >= wal_end(newest_postgres), stream)
        start = time.monotonic()
        assert stream.read(10, 1000, 0.3) == []
        assert 0.29 <= time.monotonic() - start < 10
        stream.send_status()


def test_a_publication_that_is_gone_ends_the_stream_before_the_gap(postgres: Database) -> None:
    published(
        postgres,
        "INSERT INTO t VALUES (1, 'a')",
        f"DROP PUBLICATION {QUOTED}",
        "INSERT INTO t VALUES (2, 'b')",
        f"CREATE PUBLICATION {QUOTED} FOR TABLE t",
        "INSERT INTO t VALUES (3, 'c')",
    )
    with peeked(postgres, changes=1) as stream:
        messages: list[bytes] = []
        with pytest.raises(SourceNotFound, match="no publication"):
            _read_into(stream, messages)
        assert ids(messages) in ([], [1])
        with pytest.raises(SourceNotFound):
            stream.read(10, 1000, 1.0)


def test_a_slot_that_is_gone_moved_or_read_by_another_is_told(postgres: Database) -> None:
    published(postgres, "INSERT INTO t VALUES (1, 'a')")
    with peeked(postgres) as stream:
        identity = stream.identity
        end = end_of_commit(read_until(stream, commits(1))[-1])
        with opened(postgres) as other:
            assert other.read(10, 1000, 5.0)
            postgres.execute("INSERT INTO t VALUES (2, 'b')")
            with pytest.raises(SlotBusy, match=SLOT):
                _read_into(stream, [])
    eventually(lambda: postgres.value("SELECT active FROM pg_replication_slots") is False)
    postgres.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_flush_lsn())")
    with pytest.raises(SlotMoved):
        peeked(postgres, end, known=identity)
    start = confirmed(postgres)
    with peeked(postgres, start, known=identity) as stream:
        postgres.execute(f"SELECT pg_drop_replication_slot('{SLOT}')", "INSERT INTO t VALUES (3, 'c')")
        with pytest.raises(SlotLost, match=SLOT):
            _read_into(stream, [])
    with pytest.raises(SlotLost):
        peeked(postgres, start, known=identity)


def test_a_cut_connection_is_opened_again_without_loss_or_repetition(postgres: Database) -> None:
    inserts = (f"INSERT INTO t SELECT generate_series({n}, {n + 9}), repeat('x', 20000)" for n in range(0, 1000, 10))
    published(postgres, *inserts)
    cut_at = {200, 600}
    with TcpProxy("127.0.0.1", postgres.server.port) as proxy:
        dsn = Dsn(f"postgresql://postgres:{postgres.server.password}@127.0.0.1:{proxy.port}/{postgres.name}")

        def open_stream(lsn: int) -> PeekStream:
            return PeekStream.open(dsn, SLOT, [PUBLICATION], lsn, changes=300, interval=0.02)

        def cut(rows: int) -> None:
            if due := {at for at in cut_at if at <= rows}:
                cut_at.difference_update(due)
                proxy.cut()

        with Reopened(open_stream) as stream:
            assert stream.collect(999, cut) == list(range(1000))
            assert stream.restarts == 2


def test_a_killed_server_ends_the_stream_as_unreachable(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    with server.database() as database:
        published(database, "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 50000) g")
        stream = PeekStream.open(Dsn(database.dsn), SLOT, [PUBLICATION], 0)
        assert stream.read(10, 1 << 20, 30.0)
        server.kill9()
        with pytest.raises(SourceUnreachable):
            _read_into(stream, [])
        with pytest.raises(SourceError):
            stream.read(10, 1000, 0)
        stream.close()
        server.start()
        with peeked(database) as again:
            assert len(ids(read_until(again, commits(1)))) == 50_000


def _read_into(stream: PeekStream, messages: list[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        messages += stream.read(100, 1 << 20, 0.2)
