"""What happened to a table beside its rows: it was truncated, its columns changed.

An event stands between two rows of an epoch: it comes after the rows whose seq is lower and before the others, in every
vnode. It is sealed with the epoch and forgotten with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.stream import Epoch

EVENTS = TableSchema(
    "log_events",
    1,
    key=(
        Field("log", FieldType.TEXT),
        Field("epoch", FieldType.UINT),
        Field("seq", FieldType.UINT),
        Field("place", FieldType.UINT),
    ),
    value=(Field("kind", FieldType.TEXT), Field("detail", FieldType.JSON)),
)
TRUNCATE: Final = "truncate"
SCHEMA: Final = "schema"
PARTITION: Final = "partition"

FORMER_VERSION: Final = "former_version"
"""In the detail of a schema event: the version of the log's schema before it."""
RENEWED: Final = "renewed"
"""In the detail of a schema event: the new ``since``. Columns from before it need not be those of the same number."""
RESHAPED: Final = "reshaped"
"""In the detail of a renewal: whether rows from before it have another shape, a value of :class:`Reshaped`."""
FORMER_KEY: Final = "former_key"
"""In the detail of a renewal: the key columns of rows from before it."""


class Reshaped(Enum):
    """How the rows after a renewal differ in shape from those before it.

    ``NOTHING``: columns came or went at most. ``COLUMNS``: a column has another type, or a name is that of another
    column. ``KEY``: rows are known by another key.
    """

    NOTHING = "nothing"
    COLUMNS = "columns"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event.

    :ivar seq: rows of the epoch with a lower seq come before it.
    :ivar kind: :data:`TRUNCATE`: all rows of the table are gone; :data:`SCHEMA`: its columns changed, see *detail*;
        :data:`PARTITION`: rows came or went with a partition, which the source does not tell, or something else was
        seen of the table that its rows do not show: see the text in *detail*.
    """

    epoch: Epoch
    seq: int
    kind: str
    detail: Mapping[str, Any]


class LogEvents:
    """The events of all logs of a store, as its writer notes them."""

    def __init__(self, catalog: Catalog, batch: WriteBatch) -> None:
        self._table: StateTable = catalog.open_or_create(EVENTS, batch)
        self._place = 0

    def add(self, batch: WriteBatch, log: str, event: LogEvent) -> None:
        """Seal *event* with its epoch."""
        self._place += 1
        key = (log, int(event.epoch), event.seq, self._place)
        self._table.put(batch, 0, key, (event.kind, dict(event.detail)))

    def forget(self, batch: WriteBatch, log: str, upto: int) -> None:
        """Forget the events of the epochs up to *upto*."""
        self._table.delete_range(batch, 0, (log,), (log, upto + 1))


def events_of(view: Snapshot, log: str, after: int, upto: int) -> Iterator[LogEvent]:
    """The events of the epochs in ``(after, upto]``, in order."""
    catalog = Catalog.load(view)
    if EVENTS.name in catalog.names():
        for key, (kind, detail) in catalog.open(EVENTS).scan(view, 0, (log, after + 1), (log, upto + 1)):
            yield LogEvent(Epoch(key[1]), key[2], kind, detail)
