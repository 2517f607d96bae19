"""The replication stream over real servers: complete, alive, acknowledged, and ending in plain words."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.db.postgres.slots import (
    PUBLICATION,
    QUOTED,
    SLOT,
    Reopened,
    blocks_of,
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
from tests.sampled import SOAK
from tests.servers.postgres import VERSIONS, Database, PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.errors import TransientError
from headwater.sources.errors import (
    AccessDenied,
    SlotBusy,
    SlotInvalidated,
    SlotLost,
    SlotMoved,
    SourceClosed,
    SourceError,
    SourceNotFound,
    SourceUnreachable,
)
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.heartbeat import Heartbeat
from headwater.sources.postgres.offset import Lsn
from headwater.sources.postgres.spill import SpillStore
from headwater.sources.postgres.stream import ReplicationStream

StartPostgres = Callable[..., PostgresServer]
ALL_VERSIONS = pytest.mark.parametrize("major", VERSIONS, ids=[f"pg{major}" for major in VERSIONS])


def test_100k_changes_come_whole_and_in_commit_order(postgres: Database) -> None:
    published(postgres)
    with postgres.connect() as session:
        for start in range(0, 100_000, 500):
            session.execute(
                "INSERT INTO t SELECT g, repeat('x', 50) FROM generate_series(%s::int, %s::int) g", [start, start + 499]
            )
    with opened(postgres) as stream:
        messages = read_until(stream, commits(200))
        assert stream.bytes_received == sum(map(len, messages))
    assert [inserted(message) for message in messages if kind(message) == "I"] == list(range(100_000))
    ends = [end_of_commit(message) for message in messages if kind(message) == "C"]
    assert ends == sorted(set(ends))
    assert kinds(messages) == "BR" + "I" * 500 + "C" + ("B" + "I" * 500 + "C") * 199


def test_a_batch_keeps_to_its_limits(newest_postgres: Database) -> None:
    published(newest_postgres, "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 2000) g")
    with opened(newest_postgres) as stream:
        seen = 0
        while seen < 1000:
            batch = stream.read(7, 1 << 20, 5.0)
            assert len(batch) <= 7
            seen += len(batch)
        while seen < 2003:
            batch = stream.read(10_000, 5000, 5.0)
            assert sum(map(len, batch[:-1])) < 5000
            seen += len(batch)
        assert stream.read(10, 10, 0) == []


def test_reading_waits_no_longer_than_asked_and_wakes_for_a_message(newest_postgres: Database) -> None:
    published(newest_postgres)
    with opened(newest_postgres) as stream:
        start = time.monotonic()
        assert stream.read(10, 10_000, 0.3) == []
        assert 0.29 <= time.monotonic() - start < 5
        writer = threading.Timer(0.2, newest_postgres.execute, ["INSERT INTO t VALUES (1, 'a')"])
        writer.start()
        start = time.monotonic()
        messages = read_until(stream, commits(1))
        assert time.monotonic() - start < 10
        writer.join()
        assert kinds(messages) == "BRIC"


def test_what_was_acknowledged_moves_the_slot_and_is_not_sent_again(postgres: Database) -> None:
    published(postgres, *(f"INSERT INTO t VALUES ({number}, 'a')" for number in range(10)))
    before = confirmed(postgres)
    with opened(postgres) as stream:
        messages = read_until(stream, commits(10))
        assert confirmed(postgres) == before, "what was only received is not told to be durable"
        ends = [end_of_commit(message) for message in messages if kind(message) == "C"]
        stream.acknowledge(ends[3])
        stream.acknowledge(ends[1])
        eventually(lambda: confirmed(postgres) == ends[3], stream)
        stream.acknowledge(ends[4])
    eventually(lambda: confirmed(postgres) == ends[4])
    with opened(postgres, ends[4]) as stream:
        messages = read_until(stream, commits(5))
        assert [inserted(message) for message in messages if kind(message) == "I"] == [5, 6, 7, 8, 9]
    with opened(postgres, ends[6]) as stream:
        messages = read_until(stream, commits(3))
        assert [inserted(message) for message in messages if kind(message) == "I"] == [7, 8, 9]


@pytest.mark.parametrize("major", VERSIONS if SOAK else VERSIONS[-1:])
def test_the_server_does_not_give_up_an_idle_stream_or_a_busy_reader(major: int, start_postgres: StartPostgres) -> None:
    server = start_postgres(major, {"wal_sender_timeout": "2s"})
    with server.database() as database:
        published(database)
        with opened(database) as stream:
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                assert stream.read(100, 1 << 20, 5.0) == []
            database.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g")
            first = stream.read(10, 1 << 20, 5.0)
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                stream.send_status()
                time.sleep(0.01)
            messages = first + read_until(stream, commits(1))
            assert kinds(messages).count("I") == 20_000


def test_a_reader_that_says_nothing_is_given_up_and_told_so(start_postgres: StartPostgres) -> None:
    server = start_postgres(settings={"wal_sender_timeout": "1s"})
    with server.database() as database:
        published(database)
        with opened(database) as stream:
            eventually(lambda: "terminating walsender process due to replication timeout" in server.log)
            with pytest.raises(SourceUnreachable):
                read_until(stream, lambda _: False)
            with pytest.raises(SourceError):
                stream.read(1, 1, 0)


def test_an_idle_database_tells_how_far_its_log_went(postgres: Database) -> None:
    """So that a slot releases the log that others write."""
    published(postgres, "CREATE TABLE unrelated (id int)")
    with opened(postgres) as stream:
        for _ in range(3):
            postgres.execute("INSERT INTO unrelated SELECT generate_series(1, 1000)")
            end = Lsn.parse(postgres.value("SELECT pg_current_wal_flush_lsn()::text"))
            eventually(lambda end=end: stream.server_wal_end >= end, stream)  # type: ignore[misc]
            stream.acknowledge(stream.server_wal_end)
            eventually(lambda end=end: confirmed(postgres) >= end, stream)  # type: ignore[misc]


def stream_early(database: Database) -> None:
    """Transactions of a few hundred rows are streamed before their commit."""
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")


def committed_by_spill(messages: list[bytes], spill: SpillStore) -> tuple[list[list[int]], list[int]]:
    """The ids of each transaction in commit order, streamed or not; and the xids of streamed ones that were undone."""
    done: list[list[int]] = []
    undone: list[int] = []
    for what, xid, block in blocks_of(messages):
        if what == "S":
            spill.append(xid, block)
        elif what == "A":
            subxid = int.from_bytes(block[0][30:34], "big")
            undone.append(subxid)
            spill.abort(xid, subxid)
        elif what == "c":
            rows = [row for part in spill.replay(xid) for row in part if kind(row) == "I"]
            done.append([inserted(row, streamed=True) for row in rows])
            spill.drop(xid)
        elif kind(block[0]) == "B":
            done.append([])
        elif kind(block[0]) == "I":
            done[-1].append(inserted(block[0]))
    return done, undone


def test_large_transactions_are_streamed_and_only_what_committed_is_replayed(
    postgres: Database, tmp_path: Path
) -> None:
    """Savepoints that are rolled back, whole rollbacks, several large transactions at once, and small ones between."""
    published(postgres)
    stream_early(postgres)
    expected: list[list[int]] = []
    with postgres.connect() as first, postgres.connect() as second, postgres.connect() as third:
        sessions = (first, second, third)
        for session in sessions:
            session.autocommit = False

        def insert(session: psycopg.Connection[tuple[object, ...]], start: int, count: int = 1500) -> list[int]:
            session.execute(
                "INSERT INTO t SELECT g, repeat('y', 60) FROM generate_series(%s::int, %s::int) g",
                [start, start + count - 1],
            )
            return list(range(start, start + count))

        mine: dict[int, list[int]] = defaultdict(list)
        next_id = 0
        messages: list[bytes] = []
        with opened(postgres) as stream:
            for number in range(4):
                for place, session in enumerate(sessions):
                    mine[place] += insert(session, next_id)
                    next_id += 1500
                    session.execute("SAVEPOINT outer_one")
                    insert(session, next_id)
                    session.execute("SAVEPOINT inner_one")
                    insert(session, next_id + 1500)
                    session.execute("RELEASE inner_one" if number % 2 else "SAVEPOINT third_one")
                    next_id += 3000
                    session.execute("ROLLBACK TO outer_one")
                    mine[place] += insert(session, next_id)
                    next_id += 1500
                postgres.execute(f"INSERT INTO t VALUES ({next_id}, 'small')")
                expected.append([next_id])
                next_id += 1
                messages += read_until(stream, commits(1))
            second.rollback()
            first.commit()
            expected.append(mine[0])
            postgres.execute(f"INSERT INTO t VALUES ({next_id}, 'last but one')")
            expected.append([next_id])
            third.commit()
            expected.append(mine[2])
            messages += read_until(stream, commits(3))
    assert "S" in kinds(messages)
    assert "c" in kinds(messages)
    with SpillStore(tmp_path, held_per_transaction=10_000) as spill:
        done, undone = committed_by_spill(messages, spill)
        assert done == expected
        assert len(undone) > 1
        assert spill.statistics().transactions == 0
    assert postgres.value("SELECT count(*) FROM t") == sum(map(len, expected))


def test_a_column_that_was_added_and_rolled_back_leaves_no_trace(postgres: Database, tmp_path: Path) -> None:
    """The server has streamed rows with the new column before the savepoint is rolled back."""
    published(postgres, "CREATE TABLE unrelated (id int)")
    stream_early(postgres)
    rows = "INSERT INTO t SELECT g, repeat('y', 60) FROM generate_series({}, {}) g"
    messages: list[bytes] = []
    with postgres.connect() as session, opened(postgres) as stream:
        session.autocommit = False
        session.execute(rows.format(1, 1000).encode())
        session.execute("SAVEPOINT one")
        session.execute("ALTER TABLE t ADD COLUMN more int")
        session.execute(rows.format(1001, 3000).encode())
        postgres.execute("INSERT INTO unrelated VALUES (1)")
        messages += read_until(stream, lambda read: [len(columns) for columns in map(described, read)].count(3) > 0)
        session.execute("ROLLBACK TO one")
        session.execute(rows.format(3001, 5000).encode())
        session.commit()
        messages += read_until(stream, commits(1))
    with SpillStore(tmp_path) as spill:
        for what, xid, block in blocks_of(messages):
            if what == "S":
                spill.append(xid, block)
            elif what == "A":
                spill.abort(xid, int.from_bytes(block[0][30:34], "big"))
            elif what == "c":
                replayed = [one for part in spill.replay(xid) for one in part]
                found = [inserted(one, streamed=True) for one in replayed if kind(one) == "I"]
                assert found == [*range(1, 1001), *range(3001, 5001)]
                first_after = next(kind(one) for one in replayed if one[26:30] != xid.to_bytes(4, "big"))
                assert first_after == "R", "the server describes the table again"
                assert {tuple(described(one)) for one in replayed if kind(one) == "R"} == {("id", "v")}


def described(message: bytes) -> list[str]:
    """The columns of a streamed Relation; none of another message."""
    if kind(message) != "R":
        return []
    _, _, rest = message[34:].split(b"\0", 2)
    names, rest = [], rest[3:]
    while rest:
        name, _, rest = rest[1:].partition(b"\0")
        names.append(name.decode())
        rest = rest[8:]
    return names


def through(proxy: TcpProxy, database: Database, timeout_seconds: float = 60.0) -> Dsn:
    server = database.server
    text = f"postgresql://postgres:{server.password}@127.0.0.1:{proxy.port}/{database.name}"
    return Dsn(text, timeout_seconds)


def followed(dsn: Dsn, start: int = 0, known: bool = True) -> Reopened:
    identity = None
    if known:
        with ReplicationStream.open(dsn, SLOT, [PUBLICATION], start) as first:
            identity = first.identity

    def open_stream(lsn: int) -> ReplicationStream:
        return ReplicationStream.open(dsn, SLOT, [PUBLICATION], lsn, known=identity if lsn else None)

    return Reopened(open_stream, start)


def test_cut_connections_lose_and_repeat_nothing(postgres: Database) -> None:
    """More is sent than buffers between can hold, so that each cut takes something with it."""
    inserts = (f"INSERT INTO t SELECT generate_series({n}, {n + 9}), repeat('x', 20000)" for n in range(0, 2000, 10))
    published(postgres, *inserts)
    cuts: set[int] = set()
    with (
        TcpProxy("127.0.0.1", postgres.server.port) as proxy,
        followed(through(proxy, postgres), known=False) as stream,
    ):

        def cut(rows: int) -> None:
            if rows // 500 not in cuts:
                cuts.add(rows // 500)
                proxy.cut()

        assert stream.collect(1999, cut) == list(range(2000))
        assert stream.restarts >= 3


def test_a_server_that_falls_silent_is_noticed(newest_postgres: Database) -> None:
    published(newest_postgres)
    with TcpProxy("127.0.0.1", newest_postgres.server.port) as proxy:
        dsn = through(proxy, newest_postgres, timeout_seconds=1.0)
        with ReplicationStream.open(dsn, SLOT, [PUBLICATION], 0) as stream:
            start = time.monotonic()
            while time.monotonic() - start < 2.5:
                assert stream.read(10, 1000, 0.5) == [], "a server that answers is not silent"
            proxy.stall()
            start = time.monotonic()
            with pytest.raises(SourceUnreachable, match="said nothing"):
                read_until(stream, lambda _: False)
            assert time.monotonic() - start < 20
            proxy.resume()


@ALL_VERSIONS
@pytest.mark.parametrize("how", ["restart", "kill9"])
def test_a_server_that_is_restarted_or_killed_loses_and_repeats_nothing(
    major: int, how: str, start_postgres: StartPostgres
) -> None:
    server = start_postgres(major, {"fsync": "on"})
    with server.database() as database:
        published(database, "INSERT INTO t SELECT generate_series(0, 99), 'a'")
        done: list[int] = []

        def trouble(rows: int) -> None:
            if rows >= 100 and not done:
                done.append(rows)
                writer.start()

        def write() -> None:
            if how == "restart":
                server.restart()
            else:
                server.kill9()
                server.start()
            for start in range(100, 300, 10):
                database.execute(f"INSERT INTO t SELECT generate_series({start}, {start + 9}), 'b'")

        writer = threading.Thread(target=write)
        with followed(Dsn(database.dsn)) as stream:
            durable = stream.collect(299, trouble)
            writer.join()
            assert durable == list(range(300))
            assert stream.restarts >= 1


def test_a_slot_that_is_dropped_while_it_is_read_is_lost(postgres: Database) -> None:
    published(postgres, "INSERT INTO t VALUES (1, 'a')")
    with followed(Dsn(postgres.socket_dsn)) as stream:
        assert stream.stream.read(100, 1 << 20, 5.0)
        stream.acknowledge(Lsn.parse(postgres.value("SELECT pg_current_wal_flush_lsn()::text")))
        with postgres.connect() as session:
            session.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
            eventually(lambda: _dropped(session))
        with pytest.raises(SlotLost, match=SLOT):
            stream.read_to_the_end()


def test_a_slot_that_somebody_else_moved_is_never_read_from_in_silence(postgres: Database) -> None:
    published(postgres, "INSERT INTO t VALUES (1, 'a')")
    with opened(postgres) as stream:
        identity = stream.identity
        end = end_of_commit(read_until(stream, commits(1))[-1])
        stream.acknowledge(end)
    postgres.execute("INSERT INTO t VALUES (2, 'b')")
    eventually(lambda: postgres.value("SELECT active FROM pg_replication_slots") is False)
    postgres.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_flush_lsn())")
    with pytest.raises(SlotMoved):
        opened(postgres, end, known=identity)


@ALL_VERSIONS
def test_a_slot_that_the_server_gave_up_needs_a_person(major: int, start_postgres: StartPostgres) -> None:
    server = start_postgres(major, {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"})
    with server.database() as database:
        published(database, "CREATE TABLE unrelated (id int, v text)")
        with followed(Dsn(database.dsn)) as stream:
            for _ in range(4):
                database.execute(
                    "INSERT INTO unrelated SELECT g, repeat('x', 500) FROM generate_series(1, 20000) g",
                    "SELECT pg_switch_wal()",
                    "CHECKPOINT",
                )
            with pytest.raises(SlotInvalidated, match=SLOT):
                stream.read_to_the_end()


def test_a_publication_that_is_gone_ends_the_stream_before_the_gap(postgres: Database) -> None:
    """Up to 17 the server refuses; from 18 on it only warns, and leaves the changes out."""
    published(
        postgres,
        "INSERT INTO t VALUES (1, 'a')",
        f"DROP PUBLICATION {QUOTED}",
        "INSERT INTO t VALUES (2, 'b')",
        f"CREATE PUBLICATION {QUOTED} FOR TABLE t",
        "INSERT INTO t VALUES (3, 'c')",
    )
    with opened(postgres) as stream:
        messages: list[bytes] = []
        with pytest.raises(SourceNotFound, match="no publication") as gone:
            _read_into(stream, messages)
        assert not isinstance(gone.value, TransientError)
        assert "resnapshot" in str(gone.value)
        assert [inserted(message) for message in messages if kind(message) == "I"] == [1]
        with pytest.raises(SourceNotFound):
            stream.read(10, 1000, 1.0)


def test_a_slot_has_one_reader(newest_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    published(newest_postgres)
    monkeypatch.setattr("headwater.sources.postgres.stream.SLOT_RELEASE", 0.2)
    with opened(newest_postgres):
        with pytest.raises(SlotBusy, match=SLOT) as busy:
            opened(newest_postgres)
        assert isinstance(busy.value, TransientError)
        assert busy.value.pid == newest_postgres.value("SELECT active_pid FROM pg_replication_slots")
    opened(newest_postgres).close()


def test_a_missing_slot_and_a_refused_user_are_told_without_the_password(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY)", f"CREATE PUBLICATION {QUOTED} FOR TABLE t")
    with pytest.raises(SlotLost, match=SLOT):
        opened(newest_postgres)
    role = newest_postgres.role("plain")
    with pytest.raises(AccessDenied, match="REPLICATION") as refused:
        ReplicationStream.open(Dsn(newest_postgres.dsn_of(role)), SLOT, [PUBLICATION], 0)
    assert newest_postgres.server.password not in str(refused.value)


def test_a_password_that_was_changed_needs_a_person(newest_postgres: Database) -> None:
    published(newest_postgres)
    role = newest_postgres.role("capturing", "REPLICATION")
    with followed(Dsn(newest_postgres.dsn_of(role)), known=False) as stream:
        newest_postgres.execute(f"ALTER ROLE {role} PASSWORD 'another'")
        newest_postgres.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        with pytest.raises(AccessDenied):
            stream.read_to_the_end()


def test_a_role_with_replication_alone_can_read(postgres: Database) -> None:
    published(postgres, "INSERT INTO t VALUES (1, 'a')")
    role = postgres.role("capturing", "REPLICATION")
    dsn = Dsn(postgres.dsn_of(role))
    with ReplicationStream.open(dsn, SLOT, [PUBLICATION], 0) as stream:
        assert kinds(read_until(stream, commits(1))) == "BRIC"
        identity = stream.identity
    start = confirmed(postgres)
    with ReplicationStream.open(dsn, SLOT, [PUBLICATION], start, known=identity) as stream:
        assert kinds(read_until(stream, commits(1))) == "BRIC"


def test_an_interrupted_read_ends_the_stream(newest_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages may have been taken and not handed out: to read on would be a gap."""
    published(newest_postgres)

    def interrupted(*_: object, **__: object) -> float:
        raise KeyboardInterrupt

    with opened(newest_postgres) as stream:
        monkeypatch.setattr(stream, "_next_duty", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.read(10, 1000, 1.0)
        with pytest.raises(SourceClosed):
            stream.read(10, 1000, 1.0)


@pytest.fixture
def tls_files() -> Iterator[tuple[str, str]]:
    """A certificate and its key, as the server's user may read them."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        certificate, key = Path(name, "certificate"), Path(name, "key")
        subject = ("-subj", "/CN=localhost", "-days", "2", "-keyout", str(key), "-out", str(certificate))
        command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            for path in (Path(name), certificate, key):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        yield str(certificate), str(key)


def test_a_stream_over_tls(start_postgres: StartPostgres, tls_files: tuple[str, str]) -> None:
    certificate, key = tls_files
    server = start_postgres(15, {"ssl": "on", "ssl_cert_file": certificate, "ssl_key_file": key})
    with server.database() as database:
        published(database, "INSERT INTO t SELECT g, repeat('x', g % 30000) FROM generate_series(1, 1000) g")
        dsn = Dsn(f"{database.dsn}?sslmode=verify-ca&sslrootcert={certificate}")
        with ReplicationStream.open(dsn, SLOT, [PUBLICATION], 0) as stream:
            messages = read_until(stream, commits(1))
            assert kinds(messages).count("I") == 1000
            stream.acknowledge(end_of_commit(messages[-1]))
        assert confirmed(database) == end_of_commit(messages[-1])


def test_heartbeats_come_as_messages_and_are_rate_limited(postgres: Database) -> None:
    published(postgres)
    heartbeat = Heartbeat(Dsn(postgres.socket_dsn), interval=3600)
    with opened(postgres) as stream:
        assert heartbeat.beat()
        assert not heartbeat.beat()
        assert heartbeat.last_error is None
        (message,) = read_until(stream, bool)
        assert kind(message) == "M"
        assert b"headwater\0" in message
        eventually(lambda: stream.server_wal_end >= int.from_bytes(message[1:9], "big"), stream)
    heartbeat.close()


def test_a_heartbeat_that_fails_is_a_warning_and_the_next_one_works(newest_postgres: Database) -> None:
    role = newest_postgres.role("beating")
    heartbeat = Heartbeat(Dsn(newest_postgres.dsn_of(role)), interval=0)
    assert heartbeat.beat()
    newest_postgres.execute(
        f"ALTER ROLE {role} NOLOGIN",
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'",
    )
    assert not heartbeat.beat()
    assert not heartbeat.beat()
    refused = heartbeat.last_error
    assert isinstance(refused, AccessDenied)
    newest_postgres.execute(f"ALTER ROLE {role} LOGIN")
    assert heartbeat.beat()
    assert heartbeat.last_error is None
    heartbeat.close()


def _dropped(session: psycopg.Connection[tuple[object, ...]]) -> bool:
    try:
        session.execute(f"SELECT pg_drop_replication_slot('{SLOT}')")
        return True
    except psycopg.errors.ObjectInUse:
        return False


def _read_into(stream: ReplicationStream, messages: list[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        messages += stream.read(100, 1 << 20, 0.2)
