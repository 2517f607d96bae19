"""The versions that rows of a log begin and end, against a model that goes row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.store.sinks.file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, order
from tests.unit.sinks.test_versions import OWN, Change, batch_of

from headwater.sinks.fold import DELETED
from headwater.sinks.versions import CLOSES, IS_CURRENT, VALID_FROM, VALID_TO, version_rows


@dataclass
class Version:
    status: str | None
    total: str | None
    begin: int
    end: int | None = None


Table = dict[int, list[Version]]


def expected_of(table: Table, changes: Sequence[Change]) -> Table:
    """What *table* becomes, told one row after the other."""
    made = {key: [Version(**vars(one)) for one in found] for key, found in table.items()}
    for key in {one.values["id"] for one in changes}:
        own = [one for one in changes if one.values["id"] == key]
        found = made.setdefault(key, [])
        current = found[-1] if found and found[-1].end is None else None
        now = current.begin if current else 0
        for _, commit in groupby(own, lambda one: one.commit):
            state = (current.status, current.total) if current else None
            for one in (rows := list(commit)):
                if one.op in (INSERT, UPDATE):
                    kept = state or (None, None)
                    lacks = (one.unavailable or "").split(",")
                    total = one.values["total"] and str(one.values["total"])
                    state = (
                        kept[0] if "status" in lacks else one.values["status"],
                        kept[1] if "total" in lacks else total,
                    )
                elif one.op == DELETE:
                    state = None
            now = max(now, rows[0].at)
            if current is not None:
                current.end = now
            current = Version(*state, now) if state else None
            if current is not None:
                found.append(current)
    return {key: found for key, found in made.items() if found}


def applied(table: Table, pieces: Sequence[pa.Table]) -> Table:
    """What a sink makes of staged rows, as their columns say."""
    made = {key: [Version(**vars(one)) for one in found] for key, found in table.items()}
    for piece in pieces:
        closed: dict[int, Version] = {}
        begins, ends = (piece.column(name).cast(pa.int64()).to_pylist() for name in (VALID_FROM, VALID_TO))
        for row, begin, end in zip(piece.to_pylist(), begins, ends, strict=True):
            found = made.setdefault(row["id"], [])
            if row[CLOSES] and found and found[-1].end is None:
                closed[row["id"]] = found[-1]
                found[-1].end = max(begin, found[-1].begin)
            if row[DELETED]:
                continue
            old = closed.get(row["id"])
            lacks = (row["_unavailable"] or "").split(",")
            status = (old.status if old else None) if "status" in lacks else row["status"]
            total = (old.total if old else None) if "total" in lacks else row["total"] and str(row["total"])
            least = old.begin if old else 0
            found.append(Version(status, total, max(begin, least), None if end is None else max(end, least)))
            assert row[IS_CURRENT] == (end is None)
    return {key: found for key, found in made.items() if found}


@st.composite
def histories(draw: st.DrawFn, *, rising: bool = False) -> tuple[Table, list[list[Change]]]:
    """A table, and epochs of whole commits; *rising*: in the order of their times."""
    table: Table = {
        key: [Version("kept", "9.00", draw(st.integers(0, 30)))] for key in draw(st.sets(st.integers(0, 3)))
    }
    epochs: list[list[Change]] = []
    commit = 0
    for _ in range(draw(st.integers(1, 4))):
        epochs.append([])
        for _ in range(draw(st.integers(1, 4))):
            commit += 1
            at = (30 + commit) if rising else draw(st.integers(0, 40))
            for place in range(draw(st.integers(1, 4))):
                key, op = draw(st.integers(0, 3)), draw(st.sampled_from([INSERT, DELETE, UPDATE, OLD]))
                lacks = draw(st.sampled_from([None, "status", "total", "status,total"]))
                told = order(
                    key,
                    None if lacks and "status" in lacks else f"{commit}.{place}",
                    None if lacks and "total" in lacks else f"{commit}.00",
                )
                if op is OLD:
                    epochs[-1].append(Change(commit, at, OLD, order(key, "not to be seen")))
                    op = UPDATE
                epochs[-1].append(Change(commit, at, op, told, None if op is DELETE else lacks))
    return table, epochs


@given(histories())
def test_any_rows_give_what_a_model_gives_row_by_row(history: tuple[Table, list[list[Change]]]) -> None:
    table, epochs = history
    expected = expected_of(table, [one for epoch in epochs for one in epoch])
    batches = [batch_of(epoch, number) for number, epoch in enumerate(epochs, 1)]
    assert applied(table, [version_rows(ORDERS, OWN, batches)]) == expected


@given(histories(rising=True))
def test_any_pieces_give_the_same(history: tuple[Table, list[list[Change]]]) -> None:
    table, epochs = history
    expected = expected_of(table, [one for epoch in epochs for one in epoch])
    batches = [batch_of(epoch, number) for number, epoch in enumerate(epochs, 1)]
    assert applied(table, [version_rows(ORDERS, OWN, [batch]) for batch in batches]) == expected
