"""A server that takes our bytes and says nothing: a capture notices, and goes on through a new connection."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from tests.db.capture.captured import fill, make_tables
from tests.db.capture.running import running
from tests.db.capture.test_failures import proxied
from tests.servers.postgres import Database

from headwater.sources.errors import SourceUnreachable
from headwater.sources.postgres import snapshot
from headwater.sources.postgres.connection import Dsn, connect, server_errors
from headwater.sources.postgres.snapshot import CopyReader


@pytest.mark.parametrize("poll", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_capture_reconnects_to_a_server_that_fell_silent(
    newest_postgres: Database, tmp_path: Path, poll: bool
) -> None:
    make_tables(newest_postgres)
    with (
        proxied(newest_postgres) as (proxy, dsn),
        running(newest_postgres, tmp_path, "t", dsn=dsn, timeout_seconds=1.0, poll=poll) as capture,
    ):
        fill(newest_postgres, 1, 10)
        capture.catch_up()
        proxy.swallow()
        fill(newest_postgres, 11, 20)
        capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
        proxy.resume()
        fill(newest_postgres, 21, 30)
        capture.assert_equal("t")
        capture.assert_once("public.t")


@pytest.mark.soak
def test_a_session_notices_silence_and_waits_for_a_slow_statement(newest_postgres: Database) -> None:
    """A statement that takes longer than the timeout is not silence: the server works on it."""
    with proxied(newest_postgres) as (proxy, dsn), connect(Dsn(dsn, 1.0)) as session:
        assert session.execute("SELECT pg_sleep(1.5), 1").fetchone() == ("", 1)
        proxy.swallow()
        with pytest.raises(psycopg.OperationalError, match="said nothing"):
            session.execute("SELECT 1")
        assert session.closed
        with pytest.raises(SourceUnreachable), server_errors(Dsn(dsn)):
            connect(Dsn(dsn, 1.0))
        proxy.resume()
        with connect(Dsn(dsn, 1.0)) as other, server_errors(Dsn(dsn)):
            assert other.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.soak
@pytest.mark.parametrize("compiled", [True, False])
def test_a_copy_that_falls_silent_is_noticed(
    newest_postgres: Database, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(snapshot, "compiled_receive", lambda: None)
    with proxied(newest_postgres) as (proxy, dsn), connect(Dsn(dsn, 1.0)) as session:
        statement = b"COPY (SELECT repeat('x', 1000), pg_sleep(n / 50000) FROM generate_series(1, 60000) n) TO STDOUT"
        blocks = CopyReader(session.pgconn, session.check_answers).blocks(statement, 1 << 20)
        next(blocks)
        proxy.swallow()
        with pytest.raises(psycopg.OperationalError, match="said nothing"):
            list(blocks)


def test_an_answer_that_was_lost_is_noticed_although_others_get_theirs(newest_postgres: Database) -> None:
    """The second connection goes through, and shows that the server waits for us."""
    with proxied(newest_postgres) as (proxy, dsn), connect(Dsn(dsn, 1.0)) as session:
        proxy.swallow()
        proxy.resume()
        with pytest.raises(psycopg.OperationalError, match="said nothing"):
            session.execute("SELECT 1")
