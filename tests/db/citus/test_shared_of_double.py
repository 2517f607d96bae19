"""The scenarios that all databases share, of tables on the coordinator of a double of a Citus cluster, not of Citus.

They are the tests of ``tests/db/backfill``, with the positions, marks and snapshots of a cluster of three nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.db.backfill import test_query, test_renewal
from tests.db.backfill.shops import POSTGRES, Session
from tests.db.capture.running import RunningCapture
from tests.db.citus.running import ClusterCapture
from tests.servers.citus_double import CitusDouble

from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.snapshot import read_table
from headwater.sources.table import SourceTable

Scenario = Callable[[Any, Path], None]


def scenarios(*modules: ModuleType) -> list[Any]:
    """Their tests of a shop alone."""
    found: list[Any] = []
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and list(inspect.signature(test).parameters) == ["shop", "tmp_path"]:
                found.append(pytest.param(test, id=name))
    return found


class CoordinatorCapture(ClusterCapture):
    """A capture of tables that only the coordinator has."""

    def selected(self, table: SourceTable) -> pa.Table:
        dsn = self.double.servers[0].dsn(self.double.database)
        return pa.Table.from_batches(read_table(Dsn(dsn), table), table.schema)


class CoordinatorShop:
    """A shop whose tables are on the coordinator."""

    kind = POSTGRES

    def __init__(self, double: CitusDouble) -> None:
        self.double = double
        self.dsn = double.dsn

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        return self.double.execute(0, *statements)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with psycopg.connect(self.double.servers[0].socket_dsn(self.double.database)) as session:
            yield _Session(session)
            session.rollback()

    def capture(self, folder: Path, tables: Sequence[str], **source: Any) -> RunningCapture:
        return CoordinatorCapture(self.double, folder, *tables, **source)


class _Session:
    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._session = session

    def execute(self, statement: str) -> object:
        return self._session.execute(statement.encode())

    def commit(self) -> None:
        self._session.commit()

    def rollback(self) -> None:
        self._session.rollback()


@pytest.mark.soak
@pytest.mark.parametrize("scenario", scenarios(test_query, test_renewal))
def test_a_shared_scenario_of_a_table_on_the_coordinator(
    scenario: Scenario, double: CitusDouble, tmp_path: Path
) -> None:
    scenario(CoordinatorShop(double), tmp_path)
