"""Every type of Postgres: the stream tells, the snapshot reads and the server has the same values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.db.postgres.oracle import Column, FollowedDatabase, Row, assert_same, by_key, own, scratch_table, write
from tests.db.postgres.pg_types import Kind, array_of, composite_of, kinds_of
from tests.servers.postgres import VERSIONS, PostgresServer

from headwater.sources.table import SourceTable, SpecialValues
from headwater.stream import Op

EXAMPLES = 400 if "HEADWATER_SOAK" in os.environ else 25
MOST_TABLES, MOST_COLUMNS = 2000, 80
EDGE_COLUMNS = 60
OLD, NEW = Op.UPDATE_DELETE, Op.UPDATE_INSERT
POLICIES = (SpecialValues.STOP, SpecialValues.NULL, SpecialValues.TEXT)


@dataclass
class Typed:
    """A followed database with all types in it."""

    followed: FollowedDatabase
    kinds: list[Kind]
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def create(self, columns: list[Column], *, full: bool) -> SourceTable:
        name = f"t{next(self.numbers)}"
        listed = ", ".join(f'"{column.name}" {column.kind.sql}' for column in columns)
        identity = "FULL" if full else "DEFAULT"
        self.followed.run(
            f"CREATE TABLE {name} (id int PRIMARY KEY, {listed})", f"ALTER TABLE {name} REPLICA IDENTITY {identity}"
        )
        return self.followed.add(name)[0]


def column_name(place: int, policy: SpecialValues) -> str:
    return f"{policy.value}_{place}"


@pytest.fixture(scope="module", params=VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def typed(
    request: pytest.FixtureRequest,
    postgres_servers: Callable[[int], PostgresServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Typed]:
    policies = {
        f"public.t{table}.{column_name(place, policy)}": policy
        for table in range(MOST_TABLES)
        for place in range(MOST_COLUMNS)
        for policy in POLICIES[1:]
    }
    with postgres_servers(request.param).database() as database:
        followed = FollowedDatabase(database, tmp_path_factory.mktemp("spill"), policies)
        try:
            followed.session.execute("SET search_path = public")
            yield Typed(followed, kinds_of(followed.session))
        finally:
            followed.close()


def check_life(typed: Typed, columns: list[Column], rows: list[Row], later: list[Row], *, full: bool) -> None:
    """Rows are inserted, changed into *later*, and deleted: each time, stream and snapshot tell what the server has."""
    followed, session = typed.followed, typed.followed.session
    table = typed.create(columns, full=full)
    names = [column.name for column in columns]
    write(session, f"public.{table.name}", ["id", *names], ([str(place), *row] for place, row in enumerate(rows)))
    inserted = followed.snapshot(table)
    followed.check(table, inserted, columns)

    with scratch_table(session, f"public.{table.name}", table) as new:
        write(session, new, ["id", *names], ([str(place), *row] for place, row in enumerate(later)))
        assignments = ", ".join(f'"{name}" = n."{name}"' for name in names)
        session.execute(f"UPDATE public.{table.name} t SET {assignments} FROM {new} n WHERE n.id = t.id".encode())
    updated = followed.snapshot(table)
    followed.check(table, updated, columns)
    session.execute(f"DELETE FROM public.{table.name}".encode())

    told = followed.changes()[table.name]
    of_op = {op: by_key(own(told.filter(pc.equal(told.column("_op"), op))), table) for op in Op}
    changed = updated.filter(pc.less(updated.column("id"), len(later)))
    assert_same(of_op[Op.INSERT], inserted)
    assert_same(of_op[NEW], changed)
    if full:
        assert_same(of_op[OLD], inserted.filter(pc.less(inserted.column("id"), len(later))))
        assert_same(of_op[Op.DELETE], updated)
    else:
        assert not of_op[OLD].num_rows
        key_only = [updated.column("id"), *(pa.nulls(len(rows), field.type) for field in list(table.schema)[1:])]
        assert_same(of_op[Op.DELETE], pa.table(key_only, schema=table.schema))
    assert told.column("_unavailable").null_count == told.num_rows


def columns_of(kinds: list[Kind], policy: SpecialValues) -> list[Column]:
    return [Column(column_name(place, policy), kind, policy) for place, kind in enumerate(kinds)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_type_at_its_edges(typed: Typed, policy: SpecialValues) -> None:
    """Where the policy lets special values pass, all of them are there, too."""
    kinds = [kind for kind in typed.kinds if kind.special or policy is SpecialValues.STOP]
    for part in range(0, len(kinds), EDGE_COLUMNS):
        columns = columns_of(kinds[part : part + EDGE_COLUMNS], policy)
        values = [
            (*column.kind.edges, *(() if policy is SpecialValues.STOP else column.kind.special), None)
            for column in columns
        ]
        rows: list[Row] = [[those[place % len(those)] for those in values] for place in range(max(map(len, values)))]
        check_life(typed, columns, rows, rows[::-1], full=part % 2 == 0)


@st.composite
def tables(draw: st.DrawFn, kinds: list[Kind], composite: str) -> tuple[list[Column], list[Row], list[Row], list[Kind]]:
    """Columns, rows of them, what the first of them become, and the fields of the type *composite*."""
    fields = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    own_type = composite_of(fields, composite)
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    drawn += draw(st.sampled_from([[], [own_type], [array_of(own_type)]]))
    columns = []
    for place, kind in enumerate(drawn):
        policy = draw(st.sampled_from(POLICIES))
        columns.append(Column(column_name(place, policy), kind, policy))
    row = st.tuples(
        *(st.none() | column.kind.values(special=column.policy is not SpecialValues.STOP) for column in columns)
    )
    rows = draw(st.lists(row, min_size=1, max_size=5))
    later = draw(st.lists(row, max_size=len(rows)))
    return columns, list(rows), list(later), fields


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data(), full=st.booleans())
def test_any_table_is_told_as_it_is(typed: Typed, data: st.DataObject, full: bool) -> None:
    composite = f"c{next(typed.numbers)}"
    columns, rows, later, fields = data.draw(tables(typed.kinds, composite))
    listed = ", ".join(f"f{place} {kind.sql}" for place, kind in enumerate(fields))
    typed.followed.run(f"CREATE TYPE {composite} AS ({listed})")
    check_life(typed, columns, rows, later, full=full)
