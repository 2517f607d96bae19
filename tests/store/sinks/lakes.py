"""Lakes: a directory of Delta tables, or of Iceberg tables, with our sink into it and with the eyes of another program.

A test that takes the fixture ``lake`` runs for each kind. What a table holds is read by the library of its format.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import pyarrow as pa
from deltalake import DeltaTable, Schema
from pyiceberg.catalog import load_catalog
from tests.servers.s3 import aws_options

from headwater.sinks.delta import DeltaSink
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Mode
from headwater.sources.target_names import directory_name

from . import iceberg_tables

At = Callable[[str, Callable[[], object]], None]
"""The fixture ``at``: does something when a failpoint is passed, once."""
SinkOfLake: TypeAlias = DeltaSink | IcebergSink
ORDERS_TABLE = "public.orders"


class Lake(ABC):
    """The lake at *place*, a path or the address of a directory; *options* are those of every sink into it."""

    name: ClassVar[str]

    def __init__(self, place: str, **options: Any) -> None:
        self.place = place
        self.options: Mapping[str, Any] = options

    @classmethod
    @abstractmethod
    def in_bucket(cls, url: str, name: str, directory: Path) -> Self:
        """The lake *name* in the object store at *url*; what is not in the object store is in *directory*."""

    @abstractmethod
    def sink(self, mode: Mode = Mode.MIRROR, **options: Any) -> SinkOfLake: ...

    @abstractmethod
    def read(self, name: str = ORDERS_TABLE, *, is_current: bool | None = None) -> pa.Table:
        """The rows; of a table of versions those that are current, or are not."""

    @abstractmethod
    def files(self, *, is_current: bool | None = None) -> set[str]:
        """The files that the table of orders is made of."""

    @abstractmethod
    def newest(self) -> int:
        """What the newest commit of the table of orders is known by."""

    @abstractmethod
    def commits(self) -> int:
        """How many commits the table of orders has."""

    @abstractmethod
    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Somebody creates the table of orders."""

    @abstractmethod
    def drop(self) -> None:
        """Somebody removes the table of orders."""

    @property
    def before_commit(self) -> str:
        """The failpoint."""
        return f"sink.{self.name}.before_commit"

    def statuses(self) -> dict[int, str]:
        rows = self.read().to_pylist()
        found = {row["id"]: row["status"] for row in rows}
        assert len(found) == len(rows)
        return found


class DeltaLake(Lake):
    name = "delta"

    @classmethod
    def in_bucket(cls, url: str, name: str, directory: Path) -> Self:
        return cls(f"s3://lake/{name}", storage_options=aws_options(url))

    def sink(self, mode: Mode = Mode.MIRROR, **options: Any) -> DeltaSink:
        return DeltaSink(self.place, mode, **self.options, **options)

    def read(self, name: str = ORDERS_TABLE, *, is_current: bool | None = None) -> pa.Table:
        filters = None if is_current is None else [("_is_current", "=", is_current)]
        return self.table(name).to_pyarrow_table(filters=filters)

    def files(self, *, is_current: bool | None = None) -> set[str]:
        predicate = None if is_current is None else f"_is_current = {is_current}".lower()
        return set(self.table().file_uris(file_pruning_predicate=predicate))

    def newest(self) -> int:
        return self.table().version()

    def commits(self) -> int:
        return self.table().version() + 1

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        DeltaTable.create(f"{self.place}/{ORDERS_TABLE}", Schema.from_arrow(schema), partition_by=list(partition_by))

    def drop(self) -> None:
        shutil.rmtree(Path(self.place, ORDERS_TABLE))

    def table(self, name: str = ORDERS_TABLE) -> DeltaTable:
        directory = directory_name(*name.split(".", 1))
        return DeltaTable(f"{self.place}/{directory}", storage_options=self.options.get("storage_options"))


class IcebergLake(Lake):
    name = "iceberg"

    @classmethod
    def in_bucket(cls, url: str, name: str, directory: Path) -> Self:
        options = {
            "s3.endpoint": url,
            "s3.access-key-id": "key",
            "s3.secret-access-key": "secret",
            "s3.region": "us-east-1",
        }
        uri = f"sqlite:///{directory}/catalog.db"
        return cls(f"s3://lake/{name}", catalog_uri=uri, catalog_options=options, retention_hours=0)

    def sink(self, mode: Mode = Mode.MIRROR, **options: Any) -> IcebergSink:
        return IcebergSink(self.place, mode, **self.options, **options)

    def read(self, name: str = ORDERS_TABLE, *, is_current: bool | None = None) -> pa.Table:
        wanted = {} if is_current is None else {"row_filter": f"_is_current = {is_current}".lower()}
        return iceberg_tables.scan(self.sink(), name, **wanted)

    def files(self, *, is_current: bool | None = None) -> set[str]:
        partition: dict[str, Any] = {} if is_current is None else {"_is_current": is_current}
        return iceberg_tables.files(self.sink(), **partition)

    def newest(self) -> int:
        found = iceberg_tables.snapshot_id(self.sink())
        assert found is not None
        return found

    def commits(self) -> int:
        with iceberg_tables.open_table(self.sink()) as table:
            return len(table.metadata.snapshots)

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        Path(self.place).mkdir()
        options = {"uri": f"sqlite:///{self.place}/catalog.db", "warehouse": self.place}
        with load_catalog(self.sink().catalog, **options) as catalog:
            catalog.create_namespace("public")
            place = f"file://{Path(self.place).absolute()}/public/orders"
            with catalog.create_table_transaction(ORDERS_TABLE, schema, place) as making, making.update_spec() as spec:
                for name in partition_by:
                    spec.add_identity(name)

    def drop(self) -> None:
        with iceberg_tables.open_table(self.sink()) as table:
            table.catalog.drop_table(tuple(ORDERS_TABLE.split(".")))


LAKES: tuple[type[Lake], ...] = (DeltaLake, IcebergLake)
