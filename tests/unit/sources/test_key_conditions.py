"""Ranges of keys: how far they were read, what their rows fulfil, and how a person names them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
import pytest

from headwater.sources.errors import InvalidRange
from headwater.sources.key_conditions import condition, printed_range, where
from headwater.sources.splits import Cut, KeyRange, PartsProgress
from headwater.sources.table import SourceColumn, SourceTable


@dataclass(frozen=True)
class Column:
    name: str
    type_text: str = "int"

    @property
    def sql(self) -> str:
        return f'"{self.name}"'

    def literal(self, text: str) -> str:
        return text


A, B = Column("a"), Column("b")
TABLE = SourceTable("shop", "orders", (SourceColumn("a", pa.int32(), "int", 1),), ("a",), 1)


def test_ranges_that_are_read_one_after_the_other_go_on_where_they_broke() -> None:
    first, second = KeyRange(None, Cut(("5",))), KeyRange(Cut(("9",)), None)
    progress, middle = PartsProgress([first, second]), Cut(("3",), after=True)
    assert states(progress) == ([], [first, second])
    progress.reach(middle)
    assert states(progress) == ([KeyRange(None, middle)], [KeyRange(middle, Cut(("5",))), second])
    progress.end_part()
    assert states(progress) == ([first], [second])
    progress.reach(Cut(("12",), after=True))
    assert states(progress)[1] == [KeyRange(Cut(("12",), after=True), None)]
    progress.end_part()
    assert states(progress) == ([first, second], [])


def states(progress: PartsProgress) -> tuple[list[KeyRange], list[KeyRange]]:
    return list(progress.given), list(progress.rest)


def test_keys_of_several_columns_are_compared_column_by_column() -> None:
    assert where(KeyRange(), [A]) == ""
    assert where(KeyRange(Cut(("1",), after=True), Cut(("7",))), [A]) == ' WHERE "a" > 1 AND "a" < 7'
    assert condition(KeyRange(Cut(("1", "2"))), [A, B]) == '("a" >= 1 AND (("a" > 1) OR ("a" = 1 AND "b" >= 2)))'
    assert condition(KeyRange(end=Cut(("1",), after=True)), [A, B]) == '"a" <= 1'


def test_a_range_that_a_person_names_is_printed_by_the_source_or_refused() -> None:
    def text(column: Column, value: str) -> str | None:
        return str(int(value)) if value.lstrip("+").isdigit() else None

    def ask(statement: str) -> list[object]:
        with closing(sqlite3.connect(":memory:")) as session:
            return session.execute(statement).fetchall()

    def printed(start: Cut, end: Cut | None = None) -> KeyRange:
        return printed_range(TABLE, KeyRange(start, end), [A], text, ask)

    assert printed(Cut(("+5",))) == KeyRange(Cut(("5",)))
    assert printed(Cut(("5",)), Cut(("5",))) == KeyRange(Cut(("5",)), Cut(("5",)))
    for start, end in ((Cut(("x",)), None), (Cut(("1", "2")), None), (Cut(("7",)), Cut(("5",)))):
        with pytest.raises(InvalidRange) as caught:
            printed(start, end)
        assert caught.value.next_step
