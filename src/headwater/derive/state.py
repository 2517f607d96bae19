"""What is durable of a derivation: where it began, and up to which epoch its table was delivered.

It is a part of the query's state (:mod:`headwater.state.query_store`), written by the one process that derives.
The sink itself knows better what it has; a record here is behind it after a crash, never ahead.
"""

from __future__ import annotations

import base64
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import pyarrow as pa

from headwater import failpoints
from headwater.sources.table import SourceTable
from headwater.state import Catalog, Field, FieldType, Snapshot, TableSchema, WriteBatch
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader, open_query_store

BEFORE_SAVE = failpoints.register("derive.before_save")
AFTER_SAVE = failpoints.register("derive.after_save")

DERIVATION = TableSchema("derivation", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),))
_RECORD: Final = "record"


@dataclass(frozen=True, slots=True)
class DerivedRecord:
    """One life of a derived table.

    :ivar id: of this life: another one is made anew. :ivar start: the epoch of its first result; 0 before.
    :ivar delivered: up to which epoch it is in the sink; 0 before the first result is.
    :ivar planned: where the newest batch ends, which begins at *delivered*, unless that is as far.
    :ivar columns: of the table and its key, as text; empty before they are known.
    :ivar rows: that were delivered, of results and changes. :ivar seconds: that the last batch took.
    :ivar function: the fingerprint of what makes it; empty: written by a version that took none.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    start: int = 0
    delivered: int = 0
    columns: str = ""
    key: tuple[str, ...] = ()
    rows: int = 0
    seconds: float = 0.0
    updated_ms: int = 0
    function: str = ""
    planned: int = 0

    def table(self, namespace: str, name: str) -> SourceTable | None:
        """The derived table, if it is known."""
        if not self.columns:
            return None
        schema = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(self.columns)))
        return SourceTable.of_log(namespace, name, schema, tuple(self.key), None)

    def begun(self, table: SourceTable, epoch: int, function: str) -> Self:
        """With its first result at *epoch*."""
        schema = base64.b64encode(table.schema.serialize().to_pybytes()).decode()
        return replace(self, start=epoch, delivered=0, columns=schema, key=table.key_columns, function=function)


class DerivedState:
    """The record of one derivation, for the process that derives.

    :ivar store: the state of the query. :ivar generation: of that process; a later one fences it.
    """

    def __init__(self, state: str, query: str) -> None:
        self.store = open_query_store(state, query, takeover=True)
        self.generation = self.store.generation
        try:
            batch = WriteBatch()
            self._table = self.store.catalog.open_or_create(DERIVATION, batch)
            with self.store.snapshot() as view:
                found = self._table.get(view, 0, (_RECORD,))
            self.record = DerivedRecord() if found is None else _record_of(found[0])
            if found is None:
                self._table.put(batch, 0, (_RECORD,), (asdict(self.record),))
            if batch:
                self.store.seal(batch)
        except BaseException:
            self.store.close()
            raise

    def put(self, record: DerivedRecord) -> None:
        """Durable on return. :raises FencedError: another process derives now."""
        record = replace(record, updated_ms=time.time_ns() // 1_000_000)
        batch = WriteBatch()
        self._table.put(batch, 0, (_RECORD,), (asdict(record),))
        failpoints.hit(BEFORE_SAVE)
        self.store.seal(batch)
        failpoints.hit(AFTER_SAVE)
        self.record = record

    def close(self) -> None:
        self.store.close()


def read_record(state: str, query: str) -> DerivedRecord | None:
    """For other processes; ``None`` before it was begun."""
    try:
        with QueryReader(state, query) as reader, reader.snapshot() as view:
            return _read(view)
    except StoreNotFound:
        return None


def _read(view: Snapshot) -> DerivedRecord | None:
    catalog = Catalog.load(view)
    if DERIVATION.name not in catalog.names():
        return None
    found = catalog.open(DERIVATION).get(view, 0, (_RECORD,))
    return None if found is None else _record_of(found[0])


def _record_of(value: dict[str, Any]) -> DerivedRecord:
    return DerivedRecord(**(value | {"key": tuple(value["key"])}))
