"""The merge of what nodes told: by the times of commits, each node in its order, nothing lost, doubled or torn."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headwater.sources.citus.merge import Merge, Piece
from headwater.sources.citus.numbers import CommitNumbers, node_commits
from headwater.sources.events import Boundary, Changes, Event, Stopped, Truncated
from headwater.sources.offset import position_rows
from headwater.sources.postgres.offset import POSITION_DTYPE, POSITION_TYPE, PostgresOffset, positions_of
from headwater.sources.table import POSITION_COLUMN, SourceColumn, SourceTable

TABLES = [SourceTable("public", name, (SourceColumn("id", pa.int64(), "bigint", 1),), ("id",), 7) for name in "ab"]
TRUNCATION = 2


@dataclass(frozen=True)
class Transaction:
    """:ivar rows: of each, the place of its table; a truncation counts as one."""

    lsn: int
    time: int
    rows: tuple[int, ...]


def told_rows(some: list[tuple[Transaction, int]]) -> list[Event]:
    """Rows of transactions by their place there, as a node tells them: those of each table by themselves."""
    made: list[Event] = []
    for are_rows, run in itertools.groupby(some, lambda row: row[0].rows[row[1]] != TRUNCATION):
        if are_rows:
            rows = list(run)
            made += [
                changes(place, mine)
                for place in (0, 1)
                if (mine := [row for row in rows if row[0].rows[row[1]] == place])
            ]
        else:
            made += [Truncated(TABLES[0], PostgresOffset.of_row(one.lsn, row, 0), one.time) for one, row in run]
    return made


def changes(place: int, mine: list[tuple[Transaction, int]]) -> Changes:
    positions = positions_of(
        np.array([one.lsn for one, _ in mine], np.uint64),
        np.array([row for _, row in mine], np.uint32),
        np.zeros(len(mine), np.uint32),
    )
    columns = [
        pa.array([row for _, row in mine], pa.int64()),
        positions,
        pa.array([one.time for one, _ in mine], pa.timestamp("us", tz="UTC")),
        pa.nulls(len(mine), pa.string()),
    ]
    rows = pa.RecordBatch.from_arrays(columns, schema=TABLES[place].log_schema(POSITION_TYPE))
    return Changes(TABLES[place], rows, pa.array([1] * len(mine), pa.int8()))


@st.composite
def nodes(draw: st.DrawFn) -> dict[int, tuple[list[Transaction], list[list[Event]]]]:
    """The transactions of some nodes, and in which goes they tell them."""
    made = {}
    for group in range(draw(st.integers(1, 3))):
        row_lists = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=8))
        transactions = [
            Transaction(10 * place + 10, draw(st.integers(1, 30)), tuple(rows)) for place, rows in enumerate(row_lists)
        ]
        left = [(one, row) for one in transactions for row in range(len(one.rows))]
        goes: list[list[Event]] = []
        while left:
            count = draw(st.integers(1, len(left)))
            some, left = left[:count], left[count:]
            events = told_rows(some)
            if draw(st.integers(0, 4)) == 0:
                cut = draw(st.integers(0, count))  # all rows that came before are told before it
                events = [*told_rows(some[:cut]), Stopped(TABLES[0], "for a test"), *told_rows(some[cut:])]
            last, row = some[-1]
            is_whole = row == len(last.rows) - 1
            if is_whole and draw(st.booleans()):
                events.append(Boundary(PostgresOffset.end_of(last.lsn, last.lsn + 5, 0), last.time, 1))
            goes.append(events)
        goes.append([Boundary(PostgresOffset.at(10_000), None, 0)])
        made[group] = transactions, goes
    return made


def rows_of(piece: Piece) -> list[tuple[str, int, int]]:
    found = []
    for event in piece.events:
        if isinstance(event, Changes):
            assert event.rows.num_rows == len(event.ops) > 0
            positions = position_rows(event.rows.column(POSITION_COLUMN), POSITION_DTYPE)
            found += [
                (event.table.name, int(lsn), int(seq))
                for lsn, seq in zip(node_commits(event), positions["seq"], strict=True)
            ]
        elif isinstance(event, Truncated):
            assert isinstance(event.position, PostgresOffset)
            found.append((event.table.name, event.position.commit_lsn, event.position.seq or 0))
    return found


@given(nodes())
def test_commits_of_all_nodes_come_by_their_times_and_boundaries_tell_what_was_told(
    made: dict[int, tuple[list[Transaction], list[list[Event]]]],
) -> None:
    merge, numbers = Merge(), CommitNumbers(0)
    goes = {group: list(goes) for group, (_, goes) in made.items()}
    told: dict[int, list[tuple[str, int, int]]] = {group: [] for group in made}
    places = dict.fromkeys(made, 0)
    given_numbers: dict[tuple[int, int], int] = {}
    stops = 0
    while True:
        for group, waiting in goes.items():
            if group not in merge and waiting:
                merge.put(group, waiting.pop(0))
        taken = merge.take()
        if not taken:
            break
        found = numbers.of({group: piece.commits for group, piece in taken.items()})
        for group, piece in taken.items():
            told[group] += rows_of(piece)
            stops += sum(isinstance(event, Stopped) for event in piece.events)
            for lsn, number in zip(piece.commits.lsns.tolist(), found[group].tolist(), strict=True):
                assert given_numbers.setdefault((group, lsn), number) == number
            if piece.boundary is not None:
                position = piece.boundary.position
                assert isinstance(position, PostgresOffset)
                assert position.lsn > places[group]
                places[group] = position.lsn
        if all(piece.boundary is not None for piece in taken.values()):
            assert not merge.is_half
        if not merge.is_half:  # a boundary: of each node just the transactions before its place were told, whole
            for group, (transactions, _) in made.items():
                whole = {
                    (one.lsn, row) for one in transactions if one.lsn < places[group] for row in range(len(one.rows))
                }
                assert {(lsn, seq) for _, lsn, seq in told[group]} == whole
    assert not any(goes.values())
    assert stops == sum(isinstance(event, Stopped) for _, some in made.values() for one in some for event in one)
    latest: dict[tuple[int, int], int] = {}
    for group, (transactions, _) in made.items():
        rows = [(TABLES[at % 2].name, one.lsn, row) for one in transactions for row, at in enumerate(one.rows)]
        assert sorted(told[group]) == sorted(rows)  # each once
        for table in TABLES:
            assert [row for row in told[group] if row[0] == table.name] == [row for row in rows if row[0] == table.name]
        times = itertools.accumulate([one.time for one in transactions], max)
        latest |= {(group, one.lsn): time for one, time in zip(transactions, times, strict=True)}
    order = sorted(given_numbers, key=given_numbers.__getitem__)
    assert len(set(given_numbers.values())) == len(order) == len(latest)
    assert [latest[one] for one in order] == sorted(latest.values())
