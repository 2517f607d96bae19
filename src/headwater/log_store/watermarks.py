"""Event-time watermarks of synced logs: a promise about the rows that follow, kept when it could not be passed on.

A watermark stands between rows: what it promises is true of the rows after it only. So it is emitted in its place, and
one that was not emitted at a checkpoint is durable with it, beside the rows that were not. After a restart the newest
one of each column comes after those rows: later than it stood, which keeps the promise, and never lost. One that was
emitted before the checkpoint is not emitted again: what was made of it is in the state of whoever got it.

One row of the state table ``log_watermarks`` per log and column, an Arrow stream with the columns ``vnodes`` (JSON of a
bitmap) and ``value``: an instance speaks for its own vnodes. An instance that owns other vnodes after a restart takes
the lowest of those that spoke for them, and none where nobody spoke for one of them: it cannot know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.log_store.errors import ForeignSchema, LogCorrupt
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.stream import VnodeBitmap

WATERMARKS = TableSchema(
    "log_watermarks",
    1,
    key=(Field("log", FieldType.TEXT), Field("column", FieldType.TEXT)),
    value=(Field("places", FieldType.BYTES),),
)


@dataclass(frozen=True, slots=True, repr=False)
class Watermark:
    """No row with a lower value in *column* follows.

    :ivar value: of the column's type, not null.
    """

    column: str
    value: Any

    def check(self, schema: pa.Schema) -> None:
        """:raises ForeignSchema: not a value of a column of *schema*."""
        place = schema.get_field_index(self.column)
        if place < 0:
            raise ForeignSchema(f"A watermark is of the column {self.column!r}, which the log does not have.")
        kind = schema.field(place).type
        if not isinstance(self.value, pa.Scalar) or self.value.type != kind or not self.value.is_valid:
            raise ForeignSchema(
                f"A watermark of column {self.column!r} is not a value of its type.",
                next_step=f"Use pa.scalar(value, schema.field({self.column!r}).type).",
            )

    def is_after(self, other: Watermark) -> bool:
        """Whether it promises more than *other* of the same column."""
        return bool(pc.greater(self.value, other.value).as_py())

    def __repr__(self) -> str:
        return f"<Watermark of {self.column!r}>"


class WatermarkBook:
    """The watermarks of a store's logs that were not emitted, as its writer keeps them."""

    def __init__(self, catalog: Catalog, view: Snapshot, batch: WriteBatch) -> None:
        self._table: StateTable = catalog.open_or_create(WATERMARKS, batch)
        self._kept: dict[tuple[str, str], list[tuple[VnodeBitmap, Watermark]]] = {}
        for (log, column), (data,) in self._table.scan(view, 0):
            self._kept[log, column] = _decode(column, data)

    def kept(self, log: str, vnodes: VnodeBitmap) -> list[Watermark]:
        """What holds for all of *vnodes*, a watermark per column."""
        found: list[Watermark] = []
        for (name, _), places in sorted(self._kept.items(), key=lambda entry: entry[0]):
            if name != log:
                continue
            spoken = VnodeBitmap.empty(vnodes.count)
            lowest: Watermark | None = None
            for owned, watermark in places:
                if not owned.isdisjoint(vnodes):
                    spoken = spoken | owned
                    lowest = watermark if lowest is None or lowest.is_after(watermark) else lowest
            if lowest is not None and vnodes <= spoken:
                found.append(lowest)
        return found

    def keep(self, batch: WriteBatch, log: str, vnodes: VnodeBitmap, watermarks: Mapping[str, Watermark]) -> None:
        """Of *vnodes* only these *watermarks*, by column, were not emitted."""
        columns = {column for name, column in self._kept if name == log} | set(watermarks)
        for column in sorted(columns):
            old = self._kept.get((log, column), [])
            new = [(owned - vnodes, watermark) for owned, watermark in old if not owned <= vnodes]
            if column in watermarks:
                new.append((vnodes, watermarks[column]))
            if new == old:
                continue
            if new:
                self._kept[log, column] = new
                self._table.put(batch, 0, (log, column), (_encode(new),))
            else:
                del self._kept[log, column]
                self._table.delete(batch, 0, (log, column))


def _encode(places: list[tuple[VnodeBitmap, Watermark]]) -> bytes:
    vnodes = pa.array([json.dumps(owned.to_json()) for owned, _ in places], pa.string())
    values = pa.array([watermark.value for _, watermark in places], places[0][1].value.type)
    batch = pa.RecordBatch.from_arrays([vnodes, values], names=["vnodes", "value"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _decode(column: str, data: bytes) -> list[tuple[VnodeBitmap, Watermark]]:
    try:
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        owners = [VnodeBitmap.from_json(json.loads(text)) for text in table.column("vnodes").to_pylist()]
        return [(owned, Watermark(column, value)) for owned, value in zip(owners, table.column("value"), strict=True)]
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise LogCorrupt("A stored watermark cannot be read.") from error
