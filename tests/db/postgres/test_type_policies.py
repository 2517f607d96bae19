"""Special values under each policy, keys, defaults, generated columns and positions, by stream and by snapshot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.db.postgres.oracle import FollowedDatabase, assert_same, own
from tests.db.postgres.pg_types import BASE, FORMS, array_of, kinds_of
from tests.servers.postgres import Database

from headwater.sources.errors import InvalidKey, SourceError, SpecialValue
from headwater.sources.events import SchemaChanged
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.offset import Lsn, PostgresOffset
from headwater.sources.postgres.snapshot import read_table
from headwater.sources.table import SpecialValues

SPECIAL = [(kind.sql, value) for kind in BASE if kind.special for value in kind.special]
SPECIAL += [(array_of(kind).sql, value) for kind in BASE[:2] for value in array_of(kind).special]


@contextmanager
def following(database: Database, folder: Path, **policies: SpecialValues) -> Iterator[FollowedDatabase]:
    followed = FollowedDatabase(database, folder, {f"public.t.{name}": policy for name, policy in policies.items()})
    try:
        yield followed
    finally:
        followed.close()


def refused(followed: FollowedDatabase, name: str = "t") -> SourceError:
    """What the snapshot raises; for the same reason the stream stops the table."""
    (table,) = followed.source.tables([name])
    with pytest.raises(SourceError) as raised:
        list(read_table(Dsn(followed.database.dsn), table))
    assert name not in followed.changes()
    (stopped,) = followed.stopped
    assert (stopped.table.name, stopped.reason) == (name, str(raised.value))
    return raised.value


def test_a_special_value_is_refused_for_the_same_reason_in_stream_and_snapshot(
    newest_postgres: Database, tmp_path: Path
) -> None:
    """It names the table, the column and the option, and never the value."""
    seen = set()
    for number, (sql, group) in enumerate(itertools.groupby(SPECIAL, key=lambda pair: pair[0])):
        value = next(group)[1]
        with following(newest_postgres, tmp_path / str(number)) as followed:
            followed.run(f"CREATE TABLE t (id int PRIMARY KEY, v {sql})")
            followed.add("t")
            followed.session.execute("INSERT INTO public.t VALUES (1, NULL), (2, %s)", [value])
            error = refused(followed)
            followed.run("DROP TABLE t, sentinel", "DROP PUBLICATION headwater")
        newest_postgres.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
        assert isinstance(error, SpecialValue)
        for part in ("public.t", "'v'", "special_values of public.t.v", "headwater resnapshot public.t"):
            assert part in str(error)
        assert value not in str(error).replace(error.values, "")
        seen.add(error.values)
    assert len(seen) >= 4


@pytest.mark.parametrize("policy", [SpecialValues.NULL, SpecialValues.TEXT])
def test_special_values_are_null_or_text_where_the_policy_says_so(
    postgres: Database, tmp_path: Path, policy: SpecialValues
) -> None:
    names = [f"c{place}" for place in range(len(SPECIAL))]
    with following(postgres, tmp_path, **dict.fromkeys(names, policy)) as followed:
        listed = ", ".join(f"{name} {sql}" for name, (sql, _) in zip(names, SPECIAL, strict=True))
        followed.run(f"CREATE TABLE t (id int PRIMARY KEY, {listed})")
        (table,) = followed.add("t")
        values = ", ".join(["%s"] * len(SPECIAL))
        followed.session.execute(f"INSERT INTO public.t VALUES (1, {values})".encode(), [value for _, value in SPECIAL])
        rows = followed.snapshot(table)
        assert_same(own(followed.changes()["t"]), rows)
    (row,) = rows.drop_columns("id").to_pylist()
    if policy is SpecialValues.TEXT:
        assert None not in row.values()
        assert {field.type for field in list(rows.schema)[1:]} == {pa.string()}
    else:
        assert set(row.values()) == {None}


def test_c23_a_key_that_has_no_equal_is_an_error_and_other_columns_are_not(postgres: Database, tmp_path: Path) -> None:
    """Scenario C23."""
    with following(postgres, tmp_path, k=SpecialValues.NULL, v=SpecialValues.NULL) as followed:
        followed.run("CREATE TABLE t (k date PRIMARY KEY, v date)", "CREATE TABLE u (k date PRIMARY KEY, v date)")
        (table,) = followed.add("t")
        followed.run("INSERT INTO t VALUES ('2024-01-01', 'infinity'), ('2024-01-02', NULL)")
        rows = followed.snapshot(table)
        assert rows.column("v").null_count == 2
        assert_same(own(followed.changes()["t"]), rows)
        followed.run("INSERT INTO t VALUES ('infinity', '2024-01-01')")
        error = refused(followed)
    assert type(error) is InvalidKey
    assert "'k'" in str(error)
    assert "infinity" not in str(error)


def test_c23_a_special_key_under_the_policy_stop_names_the_option(newest_postgres: Database, tmp_path: Path) -> None:
    """Scenario C23."""
    with following(newest_postgres, tmp_path) as followed:
        followed.run("CREATE TABLE t (k timestamptz PRIMARY KEY)")
        followed.add("t")
        followed.run("INSERT INTO t VALUES ('-infinity')")
        error = refused(followed)
    assert isinstance(error, SpecialValue)
    assert "special_values of public.t.k" in str(error)


def test_c1_a_change_becomes_a_typed_row_with_its_position(postgres: Database, tmp_path: Path) -> None:
    """Scenario C1."""
    place = "SELECT pg_current_wal_insert_lsn()::text"
    with following(postgres, tmp_path) as followed:
        followed.run("CREATE TABLE t (id int PRIMARY KEY, price numeric(10,2), at timestamptz)")
        followed.add("t")
        bounds = [Lsn.parse(postgres.value(place))]
        for first in (1, 3):
            followed.run(
                f"INSERT INTO t SELECT i, i * 1.1, '2024-01-01+02' FROM generate_series({first}, {first + 1}) i"
            )
            bounds.append(Lsn.parse(postgres.value(place)))
        rows = followed.changes()["t"]
    types = dict(zip(rows.schema.names, rows.schema.types, strict=True))
    assert types["price"] == pa.decimal128(10, 2)
    assert types["at"] == pa.timestamp("us", tz="UTC")
    assert types["_position"] == pa.binary(16)
    positions: list[bytes] = rows.column("_position").to_pylist()
    assert positions == sorted(set(positions))
    commits = [int.from_bytes(position[:8], "big") for position in positions]
    for number, commit in enumerate(commits):
        assert bounds[number // 2] <= commit < bounds[number // 2 + 1]
    places = [int.from_bytes(position[8:12], "big") for position in positions]
    assert places[0] < places[1]
    assert places[:2] == places[2:]
    assert PostgresOffset.of_row(Lsn(commits[0]), places[0], 0) < PostgresOffset.of_row(Lsn(commits[2]), places[2], 0)
    assert rows.column("_commit_timestamp").null_count == 0


@pytest.mark.parametrize("version", [16, 18])
def test_c25_vectors_are_exact_text_with_their_dimension(postgres_servers: Any, tmp_path: Path, version: int) -> None:
    """Scenario C25."""
    with postgres_servers(version).database() as database, following(database, tmp_path) as followed:
        followed.run(
            "CREATE EXTENSION vector",
            "CREATE TABLE t (id int PRIMARY KEY, a vector(3), b vector, c vector(2)[])",
            """INSERT INTO t VALUES (0, '[9,9,9]', NULL, NULL)""",
        )
        (table,) = followed.add("t")
        followed.run("""INSERT INTO t VALUES (1, '[1,-0,3.4e-38]', '[0.1]', '{"[1,2]",NULL}'), (2, NULL, NULL, NULL)""")
        rows = followed.snapshot(table)
        told = own(followed.changes()["t"])
    assert_same(told, rows.slice(1))
    assert rows.to_pylist()[1] == {"id": 1, "a": "[1,-0,3.4e-38]", "b": "[0.1]", "c": ["[1,2]", None]}
    assert table.column("a").source_type == "public.vector(3)"


def test_defaults_of_added_columns_are_those_that_older_rows_have(postgres: Database, tmp_path: Path) -> None:
    with following(postgres, tmp_path) as followed:
        followed.session.execute("SET search_path = public")
        kinds = [kind for place, kind in enumerate(kinds_of(followed.session)) if place % FORMS in (0, 1, 2)]
        followed.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        followed.add("t")
        followed.run("INSERT INTO t VALUES (2)")
        followed.changes()
        added = ", ".join(
            f"ADD c{place} {kind.sql} DEFAULT '{kind.edges[-1].replace(chr(39), chr(39) * 2)}'"
            for place, kind in enumerate(kinds)
            if len(kind.edges[-1]) < 500
        )
        followed.run(f"ALTER TABLE t {added}", "INSERT INTO t (id) VALUES (3)")
        changed: list[SchemaChanged] = []
        while not changed:
            changed += [
                event for event in followed.stream.poll(1.0, stop_at_boundary=False) if isinstance(event, SchemaChanged)
            ]
        (table,) = followed.source.tables(["t"])
        before = followed.snapshot(table).slice(0, 1)
    defaults = changed[0].defaults
    assert defaults is not None
    assert_same(pa.Table.from_batches([defaults]), before.select(defaults.schema.names))
    assert defaults.num_columns > 200


def test_generated_columns_are_told_where_the_server_tells_them(postgres: Database, tmp_path: Path) -> None:
    with following(postgres, tmp_path) as followed:
        stored = "GENERATED ALWAYS AS (a * 2.50) STORED"
        virtual = ", v int GENERATED ALWAYS AS (a + 1) VIRTUAL" if postgres.server.major >= 18 else ""
        followed.run(f"CREATE TABLE t (a int PRIMARY KEY, g numeric(9,2) {stored}, b text{virtual})")
        (table,) = followed.add("t")
        followed.run("INSERT INTO t VALUES (1, DEFAULT, 'x')")
        rows = followed.snapshot(table)
        assert_same(own(followed.changes()["t"]), rows)
    assert rows.schema.names == (["a", "g", "b"] if postgres.server.major >= 18 else ["a", "b"])
