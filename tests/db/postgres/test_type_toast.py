"""Large values that an update left alone, and the keys by which they are read again: of every type that has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest
from psycopg import errors as pg
from tests.db.postgres.oracle import Column, FollowedDatabase, assert_same, by_key, own
from tests.db.postgres.pg_types import FORMS, Kind, kinds_of
from tests.servers.postgres import Database

from headwater.stream import Op

DIGITS = "repeat(i || '7', 6000)"
WORDS = "repeat('größe, \"it''s\" \\ ' || i, 200)"
LARGE = {
    "text": WORDS,
    "varchar": WORDS,
    "char(9000)": f"left({WORDS}, 9000)",
    "public.citext": WORDS,
    "bytea": f"convert_to({WORDS}, 'UTF8')",
    "json": f"json_build_array({WORDS}, 1.10)",
    "jsonb": f"jsonb_build_array({WORDS}, 1.10)",
    "xml": f"xmlelement(name a, {WORDS})",
    "numeric": f"({DIGITS} || '.50')::numeric",
    "bit varying": "repeat('101', 9000 + i)::bit varying",
    "bit(20000)": "repeat('1011', 5000)::bit(20000)",
    "integer[]": "array_fill(i, ARRAY[3000])",
    "text[]": f"ARRAY[{WORDS}, NULL, '']",
    "numeric(10,2)[]": "array_fill(i + 0.50, ARRAY[2000])",
    "timestamp with time zone[]": "array_fill(timestamptz '2024-01-01 00:00:00.1+00', ARRAY[2000])",
    "bytea[]": f"ARRAY[convert_to({WORDS}, 'UTF8')]",
    "public.mood[]": "array_fill('very happy'::public.mood, ARRAY[2000])",
    "public.pair": f"ROW(i, {WORDS}, NULL)::public.pair",
    "public.pair[]": f"ARRAY[ROW(i, {WORDS}, NULL)::public.pair, NULL]",
    "public.textrange": f"public.textrange('a', {WORDS})",
    "int4multirange": "(SELECT range_agg(int4range(n * 3, n * 3 + 2)) FROM generate_series(1, 2000) n)",
    "tsvector": "(SELECT string_agg('w' || n || ':' || n, ' ') FROM generate_series(1, 2000) n)::tsvector",
    "path": "('[' || repeat('(0.1,-0),', 500) || '(1,2)]')::path",
    "polygon": "('(' || repeat('(0.1,-0),', 500) || '(1,2))')::polygon",
    "public.hstore": f"public.hstore('k', {WORDS})",
    "public.vector": "(SELECT array_agg(n / 7.0) FROM generate_series(1, 2000) n)::public.vector",
    "public.dom": WORDS,
    "public.doms[]": f"ARRAY[{WORDS}]::public.doms[]",
}


@pytest.fixture
def followed(postgres: Database, tmp_path: Path) -> Iterator[tuple[FollowedDatabase, list[Kind]]]:
    followed = FollowedDatabase(postgres, tmp_path, {})
    followed.session.execute("SET search_path = public")
    try:
        kinds = kinds_of(followed.session)
        followed.run("CREATE DOMAIN dom AS text", "CREATE DOMAIN doms AS varchar(8000)")
        yield followed, kinds
    finally:
        followed.close()


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_m28_unchanged_large_values_of_every_type_are_told(
    followed: tuple[FollowedDatabase, list[Kind]], identity: str
) -> None:
    database, kinds = followed
    there = {kind.sql for kind in kinds}
    large = {sql: value for sql, value in LARGE.items() if sql in there or not _is_optional(sql)}
    names = [f"c{place}" for place in range(len(large))]
    database.run(
        f"CREATE TABLE big (id int PRIMARY KEY, n int, {', '.join(map(' '.join, zip(names, large, strict=True)))})",
        f"ALTER TABLE big {', '.join(f'ALTER {name} SET STORAGE EXTERNAL' for name in names)}",
        f"ALTER TABLE big REPLICA IDENTITY {identity}",
        f"INSERT INTO big SELECT i, 0, {', '.join(large.values())} FROM generate_series(1, 3) i",
    )
    toast = database.database.value("SELECT reltoastrelid::regclass FROM pg_class WHERE relname = 'big'")
    assert database.database.value(f"SELECT count(DISTINCT chunk_id) FROM {toast}") == 3 * len(large)
    (table,) = database.add("big")
    database.run("UPDATE big SET n = n + 1")
    rows = database.snapshot(table)
    of_sql = {kind.sql: kind for kind in kinds}
    columns = [Column(name, of_sql[sql]) for name, sql in zip(names, large, strict=True) if sql in of_sql]
    database.check(table, rows, columns)
    told = database.changes()["big"]
    assert told.column("_unavailable").null_count == told.num_rows
    assert_same(by_key(own(told.filter(pc.equal(told.column("_op"), Op.UPDATE_INSERT))), table), rows)
    if identity == "FULL":
        old = by_key(own(told.filter(pc.equal(told.column("_op"), Op.UPDATE_DELETE))), table)
        assert_same(old.drop_columns("n"), rows.drop_columns("n"))


def _is_optional(sql: str) -> bool:
    return sql in ("public.citext", "xml", "public.hstore", "public.vector")


def test_m28_large_values_are_found_by_keys_of_every_type(followed: tuple[FollowedDatabase, list[Kind]]) -> None:
    database, kinds = followed
    names = []
    for place, kind in enumerate(kinds):
        if place % FORMS and place % 23:
            continue  # each type alone, and some domains and arrays
        name = f"k{place}"
        values = [text for text in kind.edges if len(text) < 200 and text != "-"]  # of regclass: none
        try:
            with database.session.transaction():
                database.run(
                    f"CREATE TABLE {name} (k {kind.sql} PRIMARY KEY, body text, n int)",
                    f"ALTER TABLE {name} ALTER body SET STORAGE EXTERNAL",
                )
                insert = f"INSERT INTO public.{name} VALUES (%s, repeat('body', 2000), 0) ON CONFLICT DO NOTHING"
                for value in values:
                    database.session.execute(insert.encode(), [value])
        except (pg.UndefinedObject, pg.UndefinedFunction):
            continue  # nothing orders values of this type, so none is a key
        names.append(name)
    assert len(names) > 70
    tables = database.add(*names)
    database.run(*(f"UPDATE {name} SET n = 1" for name in names))
    told = database.changes()
    for name, table in zip(names, tables, strict=True):
        updates = told[name]
        assert updates.column("_unavailable").null_count == updates.num_rows, table.columns[0]
        assert set(updates.column("body").to_pylist()) == {"body" * 2000}, table.columns[0]
        assert updates.num_rows == database.database.value(f"SELECT count(*) FROM {name}"), table.columns[0]
