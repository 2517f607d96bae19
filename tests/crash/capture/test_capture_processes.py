"""A capture and its Postgres, both killed at random under live writers: every change arrives exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.capture.capture_process import PostgresProcess
from tests.crash.capture.postgres_shop import TABLES, PostgresShop
from tests.crash.capture.rounds import Victim, assert_exactly_once
from tests.sampled import SOAK
from tests.servers.postgres import Database, PostgresServer


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whoever_is_killed(
    server: PostgresServer, database: Database, tmp_path: Path
) -> None:
    capture = PostgresProcess(database, tmp_path, TABLES)
    victims: list[list[Victim]] = [[capture], [capture], [server], [capture, server]]
    assert_exactly_once(PostgresShop(database), capture, victims, rounds=30 if SOAK else 5)
