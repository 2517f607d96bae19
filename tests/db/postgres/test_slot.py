"""The slot, on each version: what can go wrong between two runs is told, and never becomes a gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from psycopg.pq import ExecStatus
from tests.servers.postgres import VERSIONS, Database, PostgresServer

from headwater.errors import InputError
from headwater.sources.errors import (
    ServerReplaced,
    SlotBusy,
    SlotInvalidated,
    SlotLost,
    SlotMoved,
    SourceBusy,
    SourceMisconfigured,
    SourceWentBack,
)
from headwater.sources.postgres import slot as slots
from headwater.sources.postgres.connection import Connection, Dsn, connect, connect_replication
from headwater.sources.postgres.offset import Lsn
from headwater.sources.postgres.slot import (
    ServerIdentity,
    Slot,
    check_slot,
    create_slot,
    drop_slot,
    read_slot,
    read_slots,
    server_position,
)

StartPostgres = Callable[..., PostgresServer]
NAME = "headwater_test"


@contextmanager
def replication(database: Database) -> Iterator[Connection]:
    with connect_replication(Dsn(database.dsn)) as session:
        yield session


def start(database: Database) -> tuple[Slot, ServerIdentity]:
    """A slot and the server that it is of, as the first run makes them."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, body text)", "CREATE PUBLICATION p FOR TABLE t")
    with connect(Dsn(database.dsn)) as session:
        return create_slot(session, NAME), server_position(session).identity


def check(database: Database, durable: int, known: ServerIdentity) -> Slot:
    """What a later run does first."""
    with connect(Dsn(database.dsn)) as session, replication(database) as walsender:
        return check_slot(read_slot(session, NAME), NAME, durable, known, server_position(walsender))


def confirmed(slot: Slot) -> Lsn:
    assert slot.confirmed is not None
    return slot.confirmed


def write_wal(database: Database, megabytes: int) -> None:
    database.execute(
        f"SELECT pg_logical_emit_message(false, 'fill', repeat('x', {megabytes} * 1000 * 1000))",
        "SELECT pg_switch_wal()",
        "CHECKPOINT",
    )


def test_a_slot_is_made_once_and_goes_on(postgres: Database) -> None:
    slot, known = start(postgres)
    assert slot.plugin == "pgoutput"
    assert slot.database == postgres.name
    assert slot.failover == (postgres.server.major >= 17)
    assert slot.invalidation is None
    with connect(Dsn(postgres.dsn)) as session:
        assert create_slot(session, NAME).confirmed == slot.confirmed
        assert [one.name for one in read_slots(session)] == [NAME]
    assert known.timeline == 1
    assert ServerIdentity.from_json(known.to_json()) == known
    assert check(postgres, confirmed(slot), known).name == NAME
    postgres.execute("INSERT INTO t VALUES (1)")
    assert check(postgres, confirmed(slot), known).held_bytes > 0
    with connect(Dsn(postgres.dsn)) as session:
        drop_slot(session, NAME)
        drop_slot(session, NAME)
        assert read_slot(session, NAME) is None


def test_a_limited_user_can_do_all_of_it(postgres: Database) -> None:
    dsn = Dsn(postgres.dsn_of(postgres.role("reader", "REPLICATION")))
    with connect(dsn) as session, connect_replication(dsn) as walsender:
        slot = create_slot(session, NAME)
        position = server_position(session)
        assert position == replace(server_position(walsender), wal_end=position.wal_end)
        check_slot(read_slot(session, NAME), NAME, confirmed(slot), position.identity, position)
        drop_slot(session, NAME)


def test_a_dropped_slot_is_lost_and_not_made_again(postgres: Database) -> None:
    slot, known = start(postgres)
    postgres.execute(f"SELECT pg_drop_replication_slot('{NAME}')", "INSERT INTO t VALUES (1)")
    with pytest.raises(SlotLost) as lost:
        check(postgres, confirmed(slot), known)
    assert "headwater resnapshot" in (lost.value.next_step or "")
    assert postgres.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0


def test_a_slot_that_somebody_else_moved_is_told(postgres: Database) -> None:
    slot, known = start(postgres)
    postgres.execute("INSERT INTO t VALUES (1)")
    check(postgres, confirmed(slot), known)
    postgres.execute(f"SELECT pg_replication_slot_advance('{NAME}', pg_current_wal_lsn())")
    with pytest.raises(SlotMoved, match="moved") as moved:
        check(postgres, confirmed(slot), known)
    assert "headwater resnapshot" in (moved.value.next_step or "")


def test_another_server_or_database_behind_the_address_is_told(
    postgres: Database, start_postgres: StartPostgres
) -> None:
    slot, known = start(postgres)
    with start_postgres(postgres.server.major).database() as other:
        other.execute("SELECT pg_switch_wal()")
        with connect(Dsn(other.dsn)) as session:
            create_slot(session, NAME)
        with pytest.raises(ServerReplaced, match="another server"):
            check(other, confirmed(slot), known)
    with pytest.raises(ServerReplaced):
        check(postgres, confirmed(slot), replace(known, database="another"))


@pytest.mark.parametrize("major", VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def test_a_slot_that_the_server_gave_up_for_its_size_is_told(start_postgres: StartPostgres, major: int) -> None:
    settings = {"max_slot_wal_keep_size": "16MB", "min_wal_size": "32MB", "max_wal_size": "32MB", "wal_keep_size": "0"}
    with start_postgres(major, settings).database() as database:
        slot, known = start(database)
        for _ in range(8):
            write_wal(database, 16)
            found = check_invalidated(database, slot, known)
            if found:
                break
        else:
            pytest.fail("the server did not give the slot up")
        assert "max_slot_wal_keep_size" in (found.next_step or "")
        assert "headwater resnapshot" in (found.next_step or "")
        with connect(Dsn(database.dsn)) as session, pytest.raises(SlotInvalidated):
            create_slot(session, NAME)


def check_invalidated(database: Database, slot: Slot, known: ServerIdentity) -> SlotInvalidated | None:
    try:
        check(database, confirmed(slot), known)
    except SlotInvalidated as error:
        return error
    return None


@pytest.mark.parametrize("major", VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def test_timelines_a_promotion_goes_on_and_one_that_lost_changes_is_told(
    start_postgres: StartPostgres, major: int
) -> None:
    """M29 and failover: archive recovery of a copy that holds its slot stands for a promoted standby."""
    server = start_postgres(major)
    with server.database() as database:
        _, known = start(database)
        database.execute("INSERT INTO t VALUES (1)")
        before = Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text"))
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()
        with connect(Dsn(database.dsn)) as session:
            standby = server_position(session)
            assert standby.identity == known
            assert standby.wal_end >= before
        database.execute("SELECT pg_promote()")
        database.execute("INSERT INTO t VALUES (2)")
        assert check(database, before, known).name == NAME
        limited = Dsn(database.dsn_of(database.role("limited")))
        with connect(limited) as session:
            assert server_position(session).forks is None
        with replication(database) as walsender:
            position = server_position(walsender)
        assert position.identity.timeline == 2
        assert position.forks is not None
        with connect(Dsn(database.dsn)) as session:  # of a user who may read the server's files
            assert server_position(session).forks == position.forks
        fork = position.forks[1]
        assert fork >= before
        with pytest.raises(SourceWentBack, match="timeline 2"):
            check(database, Lsn(fork + 1), known)
        with connect(limited) as session, pytest.raises(SourceWentBack, match="unknown position"):
            check_slot(read_slot(session, NAME), NAME, before, known, server_position(session))


def test_a_server_whose_log_ends_before_our_position_went_back(postgres: Database) -> None:
    slot, known = start(postgres)
    with pytest.raises(SourceWentBack, match="before our position") as back:
        check(postgres, confirmed(slot) + (1 << 30), known)
    assert "headwater resnapshot" in (back.value.next_step or "")
    postgres.execute(f"SELECT pg_drop_replication_slot('{NAME}')")
    with pytest.raises(SourceWentBack):
        check(postgres, confirmed(slot) + (1 << 30), known)


def test_a_slot_in_use_is_named_with_its_process(postgres: Database) -> None:
    slot, known = start(postgres)
    command = f"START_REPLICATION SLOT {NAME} LOGICAL 0/0 (proto_version '1', publication_names 'p')"
    reader = connect_replication(Dsn(postgres.dsn))
    try:
        assert reader.pgconn.exec_(command.encode()).status == ExecStatus.COPY_BOTH
        pid = str(reader.info.backend_pid)
        with pytest.raises(SlotBusy, match=pid):
            check(postgres, confirmed(slot), known)
        with connect(Dsn(postgres.dsn)) as session, pytest.raises(SlotBusy, match=pid):
            drop_slot(session, NAME)
    finally:
        reader.close()


def test_slots_of_another_kind_and_bad_names_are_refused(postgres: Database) -> None:
    other = f"{postgres.name}_other"
    with postgres.server.connect() as elsewhere, connect(Dsn(postgres.dsn)) as session:
        for function, arguments in (("logical", [other, "pgoutput"]), ("physical", [other])):
            marks = ", ".join("%s" for _ in arguments)
            elsewhere.execute(f"SELECT pg_create_{function}_replication_slot({marks})".encode(), arguments)
            with pytest.raises(SourceMisconfigured, match="needed is one of pgoutput"):
                create_slot(session, other)
            elsewhere.execute("SELECT pg_drop_replication_slot(%s)", [other])
        for name in ("", "Upper", "with-dash", "x" * 64):
            with pytest.raises(InputError, match="slot name"):
                create_slot(session, name)


def test_open_transactions_that_hold_a_new_slot_up_are_named(
    postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "CREATE_TIMEOUT_SECONDS", 1)
    postgres.execute("CREATE TABLE t (id int)")
    with postgres.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (1)")
        with connect(Dsn(postgres.dsn)) as session:
            with pytest.raises(SourceBusy, match=str(writer.info.backend_pid)):
                create_slot(session, NAME)
            assert session.execute("SHOW statement_timeout").fetchone() == ("0",)
            assert read_slot(session, NAME) is None
            writer.execute("COMMIT")
            assert create_slot(session, NAME).name == NAME


def wait_until(server: PostgresServer, condition: str) -> None:
    deadline = time.monotonic() + 60
    with server.connect() as session:
        while session.execute(f"SELECT {condition}".encode()).fetchone() != (True,):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)


def wal_end(server: PostgresServer) -> Lsn:
    with connect(Dsn(server.dsn())) as session:
        return server_position(session).wal_end


@pytest.mark.parametrize("major", VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def test_failover_to_a_standby_without_the_slot_is_told(start_postgres: StartPostgres, major: int) -> None:
    primary = start_postgres(major)
    with primary.database() as database:
        _, known = start(database)
        standby = start_postgres(major, primary=primary)
        database.execute("INSERT INTO t VALUES (1)")
        held = wal_end(primary)
        wait_until(standby, f"pg_last_wal_replay_lsn() >= '{held}'")
        primary.kill9()
        standby.promote()
        promoted = Database(standby, database.name)
        promoted.execute("INSERT INTO t VALUES (2)")
        with pytest.raises(SlotLost):
            check(promoted, held, known)


@pytest.mark.parametrize("major", VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def test_failover_to_a_standby_that_had_less_is_told_also_when_it_has_more_by_now(
    start_postgres: StartPostgres, major: int
) -> None:
    primary = start_postgres(major)
    with primary.database() as database:
        _, known = start(database)
        standby = start_postgres(major, primary=primary)
        wait_until(standby, f"pg_last_wal_replay_lsn() >= '{wal_end(primary)}'")
        standby.stop()
        database.execute("INSERT INTO t SELECT i FROM generate_series(1, 1000) i")
        held = wal_end(primary)
        primary.kill9()
        standby.start()
        standby.promote()
        promoted = Database(standby, database.name)
        with pytest.raises(SourceWentBack, match="before our position"):
            check(promoted, held, known)
        write_wal(promoted, 16)
        with connect(Dsn(promoted.dsn)) as session:
            create_slot(session, NAME)
        assert wal_end(standby) > held
        with pytest.raises(SourceWentBack, match="left our timeline 1"):
            check(promoted, held, known)


def test_failover_to_a_standby_with_a_copy_of_the_slot_goes_on(start_postgres: StartPostgres) -> None:
    primary = start_postgres(settings={"synchronized_standby_slots": ""})
    with primary.database() as database:
        slot, known = start(database)
        assert slot.failover
        synced = {"sync_replication_slots": "on", "hot_standby_feedback": "on"}
        standby = start_postgres(settings=synced, primary=primary)
        database.execute("INSERT INTO t VALUES (1)")
        copied = "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary"
        deadline = time.monotonic() + 60
        with standby.connect() as session, database.connect() as writer:
            while session.execute(copied).fetchone() != (1,):
                assert time.monotonic() < deadline, standby.log[-2000:]
                writer.execute("SELECT pg_log_standby_snapshot()")
                writer.execute(f"SELECT pg_replication_slot_advance('{NAME}', pg_current_wal_lsn())".encode())
                time.sleep(0.1)
        with connect(Dsn(database.dsn)) as session:
            after = read_slot(session, NAME)
        assert after is not None
        database.execute("INSERT INTO t VALUES (2)")
        wait_until(standby, f"pg_last_wal_replay_lsn() >= '{wal_end(primary)}'")
        primary.kill9()
        standby.promote()
        promoted = Database(standby, database.name)
        promoted.execute("INSERT INTO t VALUES (3)")
        going_on = check(promoted, confirmed(after), known)
        assert going_on.name == NAME
        assert server_identity(promoted).timeline == 2
        read = promoted.value(
            f"SELECT count(*) FROM pg_logical_slot_peek_binary_changes('{NAME}', NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'p') WHERE get_byte(data, 0) = ascii('I')"
        )
        assert read == 2


def server_identity(database: Database) -> ServerIdentity:
    with connect(Dsn(database.dsn)) as session:
        return server_position(session).identity
