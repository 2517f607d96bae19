"""A capture of a double of a Citus cluster under test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.db.capture.running import RunningCapture
from tests.servers.citus_double import CitusDouble, log_ends

from headwater.capture import SourceState
from headwater.sources.citus.offset import CitusOffset
from headwater.sources.table import SourceTable
from headwater.state import open_reader


class ClusterCapture(RunningCapture):
    """One capture of a cluster."""

    def __init__(self, double: CitusDouble, folder: Path, *tables: str, **source: Any) -> None:
        self.double = double
        super().__init__(double, folder, tables, **source)  # type: ignore[arg-type]

    def offset(self) -> CitusOffset | None:
        try:
            with open_reader(self.store) as reader, reader.snapshot() as view:
                record, _ = SourceState.read(view)
        except LookupError:
            return None
        if record is None:
            return None
        assert isinstance(record.offset, CitusOffset)
        return record.offset

    def catch_up(self) -> None:
        """Until all that the nodes have committed by now is durable."""
        targets = log_ends(self.double)

        def is_there() -> bool:
            offset = self.offset()
            if self.failure is not None or offset is None:
                return self.failure is not None
            left = targets.keys() - set(offset.retired)
            return all(group in offset.nodes and offset.nodes[group].at.lsn >= targets[group] for group in left)

        self.wait_for(is_there)
        if self.failure is not None:
            raise self.failure

    def assert_equal(self, *names: str) -> None:
        """The table that each log tells of is the table over all nodes."""
        self.catch_up()
        for name in names:
            replayed = self.replayed(f"public.{name}")
            columns = [replayed.column(own).to_pylist() for own in replayed.schema.names if not own.startswith("_")]
            found = {row[0]: row for row in zip(*columns, strict=True)}
            assert found == self.double.rows(name), name

    def selected(self, table: SourceTable) -> pa.Table:
        """The rows of a table over all nodes."""
        rows = list(self.double.rows(table.name).values())
        columns = list(zip(*rows, strict=True)) or [()] * len(table.columns)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, table.schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=table.schema)


@contextlib.contextmanager
def running(double: CitusDouble, folder: Path, *tables: str, **source: Any) -> Iterator[ClusterCapture]:
    """A capture that runs, and is stopped at the end."""
    made = ClusterCapture(double, folder, *tables, **source)
    made.start()
    if made.failure is not None:
        raise made.failure
    try:
        yield made
    finally:
        made.capture.stop()
        made._thread.join(60)
