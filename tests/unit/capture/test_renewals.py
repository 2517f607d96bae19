"""Which tables a capture takes up again, and when: pure, with a clock of the test and a source that has no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import pytest

from headwater.capture.renewal import TableRenewals
from headwater.sources.errors import SourceNotFound
from headwater.sources.source import Source
from headwater.sources.table import SourceColumn, SourceTable

TABLE = SourceTable("shop", "orders", (SourceColumn("id", pa.int32(), "int", 1),), ("id",))


class Catalog:
    """A source that says which tables it has, and no more.

    :ivar tables_now: what it has.
    """

    def __init__(self) -> None:
        self.tables_now: list[SourceTable] = []

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        found = [table for table in self.tables_now if table.full_name in names]
        if not found:
            raise SourceNotFound(f"There is no table {names[0]}.")
        return found

    def include(self, tables: Sequence[SourceTable]) -> Any:
        return "position"

    def register(self, tables: Sequence[SourceTable]) -> dict[str, str]:
        return {table.full_name: "" for table in tables}


def test_a_table_that_is_dropped_and_created_again_is_taken_up_whenever_the_capture_looks() -> None:
    catalog, now = Catalog(), [0.0]
    renewals = TableRenewals(cast(Source, catalog), lambda table: None, pause=10.0, clock=lambda: now[0])
    renewals.include("shop.orders")  # after the DROP, before the CREATE
    catalog.tables_now = [TABLE]
    now[0] = 0.2
    renewals.include("shop.orders")
    assert not renewals.tables, "it looks again after a while"
    now[0] = 3.0
    renewals.include("shop.orders")
    assert list(renewals.tables) == ["shop.orders"]


def test_a_table_that_stays_missing_is_refused_after_some_seconds() -> None:
    catalog, now = Catalog(), [0.0]
    renewals = TableRenewals(cast(Source, catalog), lambda table: None, pause=10.0, clock=lambda: now[0])
    renewals.include("shop.orders")
    now[0] = 3.0
    with pytest.raises(SourceNotFound):
        renewals.include("shop.orders")
