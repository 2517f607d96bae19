"""The mirrors of the fuzzer: the sink of the pipeline, and what anybody else reads there."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import psycopg
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from tests.fuzz.sources import PostgresFuzz, postgres_rows
from tests.fuzz.values import Rows

MIRRORS: Final = ("delta", "iceberg", "postgres")


class Mirror(Protocol):
    """A sink. :ivar toml: its section in ``pipeline.toml``."""

    toml: str

    def rows(self, table: str) -> Rows:
        """What it shows of a table."""
        ...

    def close(self) -> None: ...


class DeltaMirror:
    def __init__(self, folder: Path) -> None:
        self._lake = folder / "lake"
        self.toml = 'kind = "delta"\npath = "lake"'

    def rows(self, table: str) -> Rows:
        try:
            found = DeltaTable(str(self._lake / f"public.{table}")).to_pyarrow_table()
        except TableNotFoundError:
            return Rows((), (), ())
        return _of_arrow(found)

    def close(self) -> None:
        pass


class IcebergMirror:
    def __init__(self, folder: Path) -> None:
        self._lake = folder / "lake"
        self.toml = 'kind = "iceberg"\nwarehouse = "lake"'

    def rows(self, table: str) -> Rows:
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.exceptions import NoSuchTableError

        catalog = SqlCatalog("headwater", uri=f"sqlite:///{self._lake / 'catalog.db'}", warehouse=str(self._lake))
        try:
            return _of_arrow(catalog.load_table(f"public.{table}").scan().to_arrow())
        except NoSuchTableError:
            return Rows((), (), ())
        finally:
            catalog.close()

    def close(self) -> None:
        pass


class PostgresMirror:
    """In a database of its own, on a server that all such mirrors share."""

    def __init__(self, server: PostgresFuzz) -> None:
        self._context = server.server.database()
        self._database = self._context.__enter__()
        self.toml = f'kind = "postgres"\ndsn = "{self._database.dsn}"'

    def rows(self, table: str) -> Rows:
        with self._database.connect() as session, session.transaction():
            session.execute("SET LOCAL timezone = 'UTC'")
            try:
                return postgres_rows(session, f"public.{table}")
            except psycopg.errors.UndefinedTable:
                return Rows((), (), ())

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def _of_arrow(table: object) -> Rows:
    names = tuple(table.schema.names)  # type: ignore[attr-defined]
    columns = [column.to_pylist() for column in table.columns]  # type: ignore[attr-defined]
    return Rows(names, (), tuple(zip(*columns, strict=True)))
