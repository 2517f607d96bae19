"""What a COPY sends, taken by compiled code and by Python: the same bytes, the same errors."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests.servers.postgres import Database

from headwater.sources.postgres import snapshot
from headwater.sources.postgres.snapshot import CopyReader, compiled_receive, libpq_functions


@pytest.fixture(params=["compiled", "python"])
def session(
    request: pytest.FixtureRequest, newest_postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psycopg.Connection]:
    if request.param == "python":
        monkeypatch.setattr(snapshot, "compiled_receive", lambda: None)
    elif compiled_receive() is None or libpq_functions() is None:
        pytest.skip("no compiled code here, or no libpq whose functions can be found")
    with contextlib.closing(psycopg.connect(newest_postgres.dsn, autocommit=True)) as made:
        yield made


def copied(session: psycopg.Connection, query: str, size: int) -> list[bytes]:
    return list(CopyReader(session.pgconn).blocks(f"COPY ({query}) TO STDOUT".encode(), size))


def test_blocks_have_whole_rows_and_about_the_size_that_was_asked_for(session: psycopg.Connection) -> None:
    blocks = copied(session, "SELECT n, 'row ' || n FROM generate_series(1, 20000) n", 10_000)
    assert b"".join(blocks) == b"".join(b"%d\trow %d\n" % (n, n) for n in range(1, 20001))
    assert all(block.endswith(b"\n") for block in blocks)
    assert all(10_000 <= len(block) < 100_000 for block in blocks[:-1])
    assert session.execute("SELECT 1").fetchone() == (1,), "the session goes on"


def test_no_rows_are_no_blocks(session: psycopg.Connection) -> None:
    assert copied(session, "SELECT 1 WHERE false", 10_000) == []


def test_messages_larger_than_a_block_come_whole(session: psycopg.Connection) -> None:
    blocks = copied(session, "SELECT repeat(chr(96 + n), 3000000) FROM generate_series(1, 3) n", 1000)
    assert [hashlib.sha256(block).digest() for block in blocks] == [
        hashlib.sha256(letter * 3_000_000 + b"\n").digest() for letter in (b"a", b"b", b"c")
    ]


def test_an_error_of_the_server_in_the_middle_is_raised(session: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        copied(session, "SELECT 1 / (20000 - n) FROM generate_series(1, 30000) n", 1000)
    assert session.execute("SELECT 1").fetchone() == (1,), "the session goes on"
    assert session.execute("SELECT 1").fetchone() == (1,), "the session goes on"


def test_a_statement_that_the_server_refuses_is_raised(session: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        copied(session, "SELECT * FROM nothing", 1000)


def test_a_session_that_ends_in_the_middle_is_raised(session: psycopg.Connection, newest_postgres: Database) -> None:
    end = threading.Timer(0.5, newest_postgres.execute, [f"SELECT pg_terminate_backend({session.info.backend_pid})"])
    end.start()
    with pytest.raises(psycopg.OperationalError):
        copied(session, "SELECT n, pg_sleep(0.01) FROM generate_series(1, 3000) n", 100)
    end.join()
