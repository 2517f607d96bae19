"""Iceberg tables as another program reads them: by pyiceberg's own scan, from its own connection to the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from headwater.sinks.iceberg import IcebergSink


@contextmanager
def open_table(sink: IcebergSink, name: str = "public.orders") -> Iterator[Any]:
    """pyiceberg's table."""
    with load_catalog(
        sink.catalog, uri=sink.catalog_uri or f"sqlite:///{sink.warehouse}/catalog.db", **sink.catalog_options
    ) as catalog:
        yield catalog.load_table(tuple(name.rsplit(".", 1)))


def scan(sink: IcebergSink, name: str = "public.orders", **more: Any) -> pa.Table:
    with open_table(sink, name) as table:
        return table.scan(**more).to_arrow()


def statuses(sink: IcebergSink) -> dict[int, str]:
    rows = scan(sink).to_pylist()
    found = {row["id"]: row["status"] for row in rows}
    assert len(found) == len(rows)
    return found


def snapshot_id(sink: IcebergSink) -> int | None:
    with open_table(sink) as table:
        found: int | None = table.metadata.current_snapshot_id
    return found


def files(sink: IcebergSink, name: str = "public.orders", **partition: Any) -> set[str]:
    """The data files of the table; those whose *partition* has these values."""
    with open_table(sink, name) as table:
        rows = table.inspect.files().to_pylist()
    return {row["file_path"] for row in rows if all(row["partition"][key] == one for key, one in partition.items())}
