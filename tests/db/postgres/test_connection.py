"""Connections: settings of every session, errors in our own words, and never the password."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
from tests.servers.postgres import Database, PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.errors import TransientError
from headwater.sources.errors import (
    AccessDenied,
    InvalidDsn,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceUnreachable,
)
from headwater.sources.postgres import connection
from headwater.sources.postgres.connection import SESSION, Dsn, connect, connect_replication, server_errors

SECRET = "s3cr3t-word"


def test_every_session_has_the_settings_that_make_text_exact(postgres: Database) -> None:
    postgres.execute(
        f"ALTER DATABASE {postgres.name} SET timezone = 'Asia/Tokyo'",
        f"ALTER DATABASE {postgres.name} SET datestyle = 'German'",
        f"ALTER DATABASE {postgres.name} SET extra_float_digits = 0",
        f"ALTER DATABASE {postgres.name} SET bytea_output = 'escape'",
        f"ALTER DATABASE {postgres.name} SET statement_timeout = '1s'",
    )
    dsn = Dsn(postgres.dsn)
    for opened in (connect(dsn), connect_replication(dsn)):
        with opened as session:
            row = session.execute(
                "SELECT '2024-02-03 04:05:06+00'::timestamptz::text, 0.1::float8::text, '\\x01'::bytea::text,"
                " '1 day 2 hours'::interval::text, 1.5::numeric::money::text"
            ).fetchone()
            assert row == ("2024-02-03 04:05:06+00", "0.1", "\\x01", "1 day 02:00:00", "$1.50")
            assert session.execute("SHOW statement_timeout").fetchone() == ("0",)
            assert session.execute("SHOW row_security").fetchone() == ("off",)
            assert session.execute("SHOW application_name").fetchone() == ("headwater",)
    assert SESSION["timezone"] == "UTC"


def test_refusals_name_what_to_do_and_never_the_password(postgres: Database) -> None:
    server = postgres.server
    wrong = server.dsn(postgres.name, password=SECRET)
    no_replication = postgres.dsn_of(postgres.role("reader"))
    cases: list[tuple[str, type[SourceError], str]] = [
        (wrong, AccessDenied, "password"),
        (server.dsn(postgres.name, user="nobody_here", password=SECRET), AccessDenied, "password"),
        (f"postgresql://postgres@127.0.0.1:{server.port}/x", AccessDenied, "PGPASSWORD"),
        (server.dsn("no_such_db"), SourceNotFound, "exists"),
        (f"postgresql://u:{SECRET}@127.0.0.1:1/x", SourceUnreachable, "server runs"),
        (f"postgresql://u:{SECRET}@no-such-host.invalid/x", SourceUnreachable, "server runs"),
    ]
    for text, expected, step in cases:
        with pytest.raises(expected) as caught:
            connect(Dsn(text))
        shown = "".join(traceback.format_exception(caught.value))
        assert SECRET not in shown
        assert server.password not in shown
        assert step in (caught.value.next_step or "")
    with pytest.raises(AccessDenied) as refused:
        connect_replication(Dsn(no_replication))
    assert "REPLICATION" in (refused.value.next_step or "")


def test_unreadable_addresses_are_refused_without_repeating_them() -> None:
    for text in (
        f"mysql://u:{SECRET}@h/x",
        f"host=h pass word={SECRET}",
        f"postgresql://u:{SECRET}@h:p:q/x?bad={SECRET}",
    ):
        with pytest.raises(InvalidDsn) as caught:
            Dsn(text)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    dsn = Dsn(f"postgresql://app:{SECRET}@db.example:5433/shop?sslpassword=other-{SECRET}")
    assert str(dsn) == "postgresql://app@db.example:5433/shop"
    assert SECRET not in f"{dsn!r}{dsn}"
    assert SECRET not in dsn.hide(f"the server said {SECRET}")
    assert (dsn.user, dsn.database) == ("app", "shop")


def test_statements_that_fail_are_told_by_what_to_do(postgres: Database) -> None:
    postgres.execute("CREATE TABLE t (id int)")
    reader = Dsn(postgres.dsn_of(postgres.role("reader")))
    cases: list[tuple[str, type[SourceError]]] = [
        ("SELECT * FROM public.t", AccessDenied),
        ("SELECT * FROM public.none", SourceNotFound),
        ("SELECT pg_terminate_backend(pg_backend_pid())", SourceUnreachable),
    ]
    for statement, expected in cases:
        with connect(reader) as session, pytest.raises(expected), server_errors(reader):
            session.execute(statement.encode())
    owner = Dsn(postgres.dsn)
    with connect(owner) as one, connect(owner) as two:
        one.execute("BEGIN")
        one.execute("LOCK TABLE public.t")
        with pytest.raises(SourceBusy), server_errors(owner):
            two.execute("DO 'BEGIN LOCK TABLE public.t NOWAIT; END'")
    with connect(owner) as session, pytest.raises(SourceMisconfigured), server_errors(owner):
        session.execute("SELECT lastval()")
    guarded = postgres.value("SELECT count(*) FROM pg_settings WHERE name = 'output_plugin_libraries'")
    with (
        connect(owner) as session,
        pytest.raises(AccessDenied if guarded else SourceMisconfigured),
        server_errors(owner),
    ):
        session.execute("SELECT pg_create_logical_replication_slot('s', 'no_such_plugin')")
    with connect(owner) as session, pytest.raises(SourceError, match="22012"), server_errors(owner):
        session.execute("SELECT 1/0")


def test_values_that_the_server_repeats_are_not_shown(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TYPE mood AS ENUM ('ok')")
    owner = Dsn(newest_postgres.dsn)
    for kind, state in (("public.mood", "22P02"), ("int", "22P02"), ("smallint", "22P02"), ("date", "22007")):
        with (
            connect(owner) as session,
            pytest.raises(SourceError, match=rf"{state}.*the types of the table's columns") as raised,
            server_errors(owner),
        ):
            session.execute(f"SELECT 'row \"of\nsomebody'::{kind}".encode())
        assert "somebody" not in str(raised.value)
        assert "row" not in str(raised.value)


def test_a_cut_connection_and_a_starting_server_are_transient(newest_postgres: Database) -> None:
    server = newest_postgres.server
    with TcpProxy("127.0.0.1", server.port) as proxy:
        dsn = Dsn(newest_postgres.dsn.replace(f":{server.port}/", f":{proxy.port}/"))
        with connect(dsn) as session:
            proxy.cut()
            with pytest.raises(TransientError), server_errors(dsn):
                session.execute("SELECT 1")
        proxy.refuse()
        with pytest.raises(SourceUnreachable):
            connect(dsn)


def test_no_room_for_connections_is_busy(start_postgres: Callable[..., PostgresServer]) -> None:
    server = start_postgres(
        settings={"max_connections": "8", "max_wal_senders": "2", "superuser_reserved_connections": "1"}
    )
    with server.database() as database:
        dsn = Dsn(database.dsn_of(database.role("reader")))
        held = [connect(dsn) for _ in range(_free_connections(database))]
        with pytest.raises(SourceBusy):
            connect(dsn)
        for session in held:
            session.close()


def _free_connections(database: Database) -> int:
    return int(
        database.value(
            "SELECT sum(setting::int * CASE name WHEN 'max_connections' THEN 1 ELSE -1 END)"
            " FROM pg_settings"
            " WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections')"
        )
    )


def test_a_server_that_is_too_old_is_refused(newest_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OLDEST_VERSION", 990000)
    with pytest.raises(SourceMisconfigured, match="too old"):
        connect(Dsn(newest_postgres.dsn))
