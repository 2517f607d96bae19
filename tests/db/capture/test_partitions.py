"""Partitioned tables: all rows come under the root, and what Postgres does not log is seen, never silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.db.capture.running import RunningCapture, running
from tests.servers.postgres import Database, PostgresServer

from headwater.capture import TableState
from headwater.log_store.log_events import PARTITION, TRUNCATE
from headwater.sources.errors import UnsupportedTable
from headwater.stream import Op

EVENTS = "CREATE TABLE events (id bigint, day date, v text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)"
MONTHS = (
    "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM ('2024-01-01') TO ('2024-02-01')",
    "CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM ('2024-02-01') TO ('2024-03-01') PARTITION BY HASH (id)",
    "CREATE TABLE events_2a PARTITION OF events_2 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE events_2b PARTITION OF events_2 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
)
MARCH = "FOR VALUES FROM ('2024-03-01') TO ('2024-04-01')"


def fill(database: Database, first: int, last: int, month: int) -> None:
    database.execute(
        f"INSERT INTO events SELECT i, '2024-{month:02}-10', 'v' || i FROM generate_series({first}, {last}) i"
    )


def told(capture: RunningCapture, log: str = "public.events") -> list[str]:
    return [str(event.detail["text"]) for event in capture.events(log) if event.kind == PARTITION]


def test_a_new_column_has_its_default_in_the_rows_of_older_partitions(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(EVENTS, *MONTHS)
    with running(postgres, tmp_path, "events") as capture:
        fill(postgres, 1, 5, 2)
        postgres.execute(
            f"CREATE TABLE events_3 PARTITION OF events {MARCH}",
            "ALTER TABLE events ADD COLUMN colour text DEFAULT 'blue'",
            "CREATE TABLE events_4 PARTITION OF events FOR VALUES FROM ('2024-04-01') TO ('2024-05-01')",
        )
        fill(postgres, 10, 12, 4)
        capture.assert_equal("events")


def test_all_partitions_come_under_the_root_and_rows_may_move_between_them(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(EVENTS, *MONTHS)
    with running(postgres, tmp_path, "events") as capture:
        fill(postgres, 1, 20, 1)
        fill(postgres, 21, 60, 2)
        postgres.execute(
            "UPDATE events SET v = 'changed' WHERE id % 4 = 0",
            "UPDATE events SET day = '2024-02-20' WHERE id <= 5",  # to another partition, by the key
            "UPDATE events SET day = '2024-01-20' WHERE id BETWEEN 21 AND 25",
            "UPDATE events SET id = id + 1000 WHERE id > 55",  # to another hash
            "DELETE FROM events_2a WHERE id % 5 = 0",
            f"CREATE TABLE events_3 PARTITION OF events {MARCH}",
        )
        fill(postgres, 100, 120, 3)
        capture.assert_equal("events")
        capture.assert_once("public.events")
        capture.catch_up()
        assert told(capture) == []  # a partition that is made empty loses nothing
        moved = [row["_op"] for row in capture.rows("public.events") if row["id"] == 1]
    assert moved == [Op.INSERT, Op.DELETE, Op.INSERT]


def test_a_truncation_of_the_root_is_told_as_one_and_needs_nobody(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(EVENTS, *MONTHS)
    with running(newest_postgres, tmp_path, "events") as capture:
        fill(newest_postgres, 1, 20, 1)
        registration = capture.tables()["public.events"].registration
        newest_postgres.execute("TRUNCATE events")
        fill(newest_postgres, 21, 30, 2)
        capture.assert_equal("events")
        capture.wait_for(lambda: capture.tables()["public.events"].registration != registration)
        assert [event.kind for event in capture.events("public.events")] == [TRUNCATE]


CHANGES = {
    "attach": (f"ALTER TABLE events ATTACH PARTITION ready {MARCH}", "public.ready was attached, perhaps with rows"),
    "attach at once": (
        "CREATE TABLE fresh (LIKE events INCLUDING ALL); INSERT INTO fresh VALUES (1, '2024-03-01');"
        f" ALTER TABLE events ATTACH PARTITION fresh {MARCH}",
        "public.fresh was attached, perhaps with rows",
    ),
    "detach": ("ALTER TABLE events DETACH PARTITION events_1", "public.events_1 was detached or dropped with its rows"),
    "drop": ("DROP TABLE events_2b", "public.events_2b was detached or dropped with its rows"),
    "drop a branch": ("DROP TABLE events_2", "public.events_2a was detached or dropped with its rows; partition"),
    "truncate a leaf": ("TRUNCATE events_1", "public.events_1 was truncated"),
    "truncate a branch": ("TRUNCATE events_2", "public.events_2a was truncated; partition"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_postgres_does_not_log_of_partitions_stops_the_table(
    newest_postgres: Database, tmp_path: Path, how: str
) -> None:
    newest_postgres.execute(
        EVENTS,
        *MONTHS,
        "CREATE TABLE ready (id bigint, day date, v text, PRIMARY KEY (id, day))",
        "INSERT INTO ready VALUES (1000, '2024-03-05', 'unseen')",
    )
    statement, expected = CHANGES[how]
    with running(newest_postgres, tmp_path, "events") as capture:
        fill(newest_postgres, 1, 10, 1)
        fill(newest_postgres, 11, 20, 2)
        capture.catch_up()
        newest_postgres.execute(statement)
        text = capture.wait_until_stopped("public.events")
        assert expected in text
        assert text.endswith("Run: headwater resnapshot public.events")
        assert len(capture.rows("public.events")) == 20


@pytest.mark.parametrize("major", [15, 18])
def test_what_happened_to_partitions_while_the_capture_was_down_is_seen_at_the_start(
    postgres_servers: Callable[[int], PostgresServer], tmp_path: Path, major: int
) -> None:
    with postgres_servers(major).database() as postgres:
        _seen_at_the_start(postgres, tmp_path)


def _seen_at_the_start(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(EVENTS, *MONTHS, "CREATE TABLE ready (LIKE events INCLUDING ALL)")
    capture = RunningCapture(postgres, tmp_path, ["events"])
    capture.start()
    fill(postgres, 1, 10, 1)
    capture.catch_up()
    capture.stop()
    postgres.execute("TRUNCATE events_1", f"ALTER TABLE events ATTACH PARTITION ready {MARCH}")
    fill(postgres, 11, 20, 2)
    capture.start()
    text = capture.wait_until_stopped("public.events")
    assert "events_1 was truncated" in text
    assert "ready was attached" in text
    capture.stop()
    assert len(capture.rows("public.events")) == 20


def test_a_partition_whose_changes_are_in_no_log_stops_the_table(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(EVENTS, *MONTHS)
    with running(newest_postgres, tmp_path, "events") as capture:
        fill(newest_postgres, 1, 10, 1)
        newest_postgres.execute(f"CREATE UNLOGGED TABLE events_3 PARTITION OF events {MARCH}")
        reason = capture.wait_until_stopped("public.events")
    assert "events_3 is unlogged" in reason
    assert len(capture.rows("public.events")) == 10


def test_a_leaf_is_captured_alone(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(EVENTS, *MONTHS)
    with running(newest_postgres, tmp_path, "events_1") as capture:
        fill(newest_postgres, 1, 10, 1)
        fill(newest_postgres, 11, 20, 2)
        newest_postgres.execute(
            "UPDATE events SET day = '2024-02-20' WHERE id = 1", "UPDATE events SET day = '2024-01-20' WHERE id = 11"
        )
        capture.assert_equal("events_1")
        registration = capture.tables()["public.events_1"].registration
        newest_postgres.execute("TRUNCATE events_1", "INSERT INTO events VALUES (50, '2024-01-01', 'x')")
        capture.assert_equal("events_1")
        capture.wait_for(lambda: capture.tables()["public.events_1"].registration != registration)
        newest_postgres.execute(
            "ALTER TABLE events DETACH PARTITION events_1", "INSERT INTO events_1 VALUES (51, '2024-01-01')"
        )
        capture.assert_equal("events_1")
        assert capture.tables()["public.events_1"].state is TableState.ACTIVE


def test_a_root_and_its_leaf_are_not_captured_both(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(EVENTS, *MONTHS)
    both = RunningCapture(newest_postgres, tmp_path / "both", ["events", "events_1"])
    assert isinstance(both.fails_to_start(), UnsupportedTable)
    capture = RunningCapture(newest_postgres, tmp_path, ["events_1"])
    capture.start()
    fill(newest_postgres, 1, 10, 1)
    capture.assert_equal("events_1")
    capture.stop()
    error = capture.fails_to_start(["events"])
    assert isinstance(error, UnsupportedTable)
    assert "Name either public.events or its partitions" in str(error)
    fill(newest_postgres, 11, 20, 1)
    capture.start()
    capture.assert_equal("events_1")
    capture.stop()
