"""The scenarios that all databases share, of tables of a double of a Citus cluster, not of Citus.

They are the tests of ``tests/db/backfill``, with positions, marks and snapshots of a cluster of three nodes. A table
is local to the coordinator, a reference table, or distributed; then all of its shards are on one worker, because nobody
routes statements in the double. Two scenarios are of local tables alone: a truncated table of a cluster stops, and the
tables of the double are partitioned, of which Postgres keeps no value that a new column came with. One wants many
splits of few rows: a split of a shard is some of its blocks, so there are more shards then.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import psycopg
import pyarrow as pa
import pytest
from tests.db.backfill import test_query, test_renewal
from tests.db.backfill.shops import POSTGRES, Session
from tests.db.capture.running import RunningCapture
from tests.db.citus.running import ClusterCapture
from tests.servers.citus_double import CitusDouble

from headwater.sources.citus.cluster import TableKind
from headwater.sources.open import open_source
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.snapshot import read_table
from headwater.sources.table import SourceTable

Scenario = Callable[[Any, Path], None]

OF_LOCAL_TABLES: Final = (
    "test_a_truncate_in_the_middle_begins_anew",
    "test_a_column_that_comes_with_a_value_is_read_for_the_rows_of_before",
)
MANY_SPLITS: Final = "test_m14_another_parallelism_takes_nothing_back"
BY_DEFAULT: Final = {
    TableKind.DISTRIBUTED: ("test_a_range_is_read_once_more",),
    TableKind.REFERENCE: ("test_splits_of_the_heap_overlap_changes_and_come_right",),
}
NODES: Final = {TableKind.LOCAL: 0, TableKind.REFERENCE: 0, TableKind.DISTRIBUTED: 1}


def scenarios(*modules: ModuleType) -> list[Any]:
    """Their tests of a shop alone, for each kind of table."""
    found: list[Any] = []
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and list(inspect.signature(test).parameters) == ["shop", "tmp_path"]:
                for kind in TableKind:
                    if name in OF_LOCAL_TABLES and kind is not TableKind.LOCAL:
                        continue
                    marks = () if name in BY_DEFAULT.get(kind, ()) else (pytest.mark.soak,)
                    found.append(pytest.param(test, kind, id=f"{name}-{kind.value}", marks=marks))
    return found


class PlacedCapture(ClusterCapture):
    """A capture of tables whose rows are on one node. :ivar node: its group."""

    node = 0

    def selected(self, table: SourceTable) -> pa.Table:
        dsn = self.double.servers[self.node].dsn(self.double.database)
        source = open_source(dsn, spill=self.folder / "unused")
        (there,) = source.tables([table.full_name])
        source.close()
        return pa.Table.from_batches(read_table(Dsn(dsn), there), there.schema).cast(table.schema)


class PlacedShop:
    """A shop whose tables are of one kind, and their rows on one node."""

    kind = POSTGRES

    def __init__(self, double: CitusDouble, kind: TableKind, shards: int = 2) -> None:
        self.double, self.tables, self.shards = double, kind, shards
        self.dsn = double.dsn
        self.node = NODES[kind]

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for text in statements:
            parts = [part.strip() for part in text.split(";")]
            if self.tables is not TableKind.LOCAL and re.search("^(CREATE|DROP|ALTER) TABLE", text.strip()):
                for part in parts:
                    self._run(part)
            else:
                rows = self.double.execute(self.node, text)
        return rows

    def _run(self, statement: str) -> None:
        """What a coordinator makes of a statement about a table."""
        words = [*statement.split(), "", "", ""]
        verb, name = words[0], words[2]
        nodes = [0] if self.node == 0 else list(self.double.servers)
        if verb == "CREATE":
            self.double.place(statement, name, _hashed(statement), self.node, self.shards)
        elif verb == "DROP":
            self.double.forget(name)
            for node in nodes:
                self.double.execute(node, statement)
        elif verb == "ALTER":
            for node in nodes:
                self.double.execute(node, statement)
            if "REPLICA IDENTITY" in statement:
                for (leaf,) in self.double.execute(
                    self.node, f"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = '{name}'::regclass"
                ):
                    self.double.execute(self.node, statement.replace(f"TABLE {name}", f"TABLE {leaf}"))
        elif statement:
            self.double.execute(self.node, statement)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with psycopg.connect(self.double.servers[self.node].socket_dsn(self.double.database)) as session:
            yield _Session(session)
            session.rollback()

    def capture(self, folder: Path, tables: Sequence[str], **source: Any) -> RunningCapture:
        made = PlacedCapture(self.double, folder, *tables, **source)
        made.node = self.node
        return made


def _hashed(create: str) -> str:
    """The columns by which rows are dealt out: the key, else the first one."""
    found = re.search(r"PRIMARY KEY \(([^)]*)\)", create)
    return found[1] if found else re.split(r"\W+", create.partition("(")[2])[0]


class _Session:
    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._session = session

    def execute(self, statement: str) -> object:
        return self._session.execute(statement.encode())

    def commit(self) -> None:
        self._session.commit()

    def rollback(self) -> None:
        self._session.rollback()


@pytest.mark.parametrize(("scenario", "kind"), scenarios(test_query, test_renewal))
def test_a_shared_scenario_of_a_table_of_a_cluster(
    scenario: Scenario, kind: TableKind, double: CitusDouble, tmp_path: Path
) -> None:
    shards = 24 if getattr(scenario, "__name__", "") == MANY_SPLITS else 2
    scenario(PlacedShop(double, kind, shards), tmp_path)
