"""The state store: ordered keys, epochs, snapshots, pins, one fenced writer.

>>> from headwater.state import WriteBatch, open_writer
>>> from headwater.stream.epoch import Epoch
>>> store = open_writer("memory://example")
>>> batch = WriteBatch()
>>> batch.put(b"k", b"v")
>>> store.seal(Epoch.from_ms(1), batch)
>>> with store.snapshot() as view:
...     list(view.scan())
[(b'k', b'v')]
"""

from __future__ import annotations

from headwater.state.batch import MAX_KEY_BYTES, WriteBatch
from headwater.state.beside import beside, stores_beside
from headwater.state.catalog import Catalog
from headwater.state.location import open_reader, open_writer
from headwater.state.store import Owner, Pin, Snapshot, StateReader, StateStore, StoreStatistics
from headwater.state.table import StateTable
from headwater.state.types import Field, FieldType, TableSchema

__all__ = [
    "MAX_KEY_BYTES",
    "Catalog",
    "Field",
    "FieldType",
    "Owner",
    "Pin",
    "Snapshot",
    "StateReader",
    "StateStore",
    "StateTable",
    "StoreStatistics",
    "TableSchema",
    "WriteBatch",
    "beside",
    "open_reader",
    "open_writer",
    "stores_beside",
]
