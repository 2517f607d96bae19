"""What a query delivers to its sink: the record of each batch, its tables, and what of them is durable.

=========  ==============================================================  ===============================
state      meaning                                                         goes to
=========  ==============================================================  ===============================
PENDING    everything is staged; some tables may be committed              COMMITTED, ABORTED
COMMITTED  the sink has all tables of the batch                            (the next COMMITTED replaces it)
ABORTED    what was staged cannot be used: the batch is staged again       (removed with what was staged)
=========  ==============================================================  ===============================

The records are in the query's section of the pipeline store. The coordinator writes them; any process can read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final, Self, TypeVar

import pyarrow as pa

from headwater.sinks.errors import SinkRowError, SinkSchemaError
from headwater.sinks.sink import Committed, Sink, Staged
from headwater.sinks.staged_codec import NotStorable, encode
from headwater.sources.errors import RefusedValue, UnsupportedTable
from headwater.sources.table import SourceTable
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader, QueryStore

DELIVERIES = TableSchema(
    "deliveries",
    1,
    key=(Field("number", FieldType.INT),),
    value=(Field("record", FieldType.JSON), Field("staged", FieldType.BYTES)),
)
DELIVERY_STATE = TableSchema(
    "delivery_state", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
TABLE: Final = "table/"
"""Before the name of a table: the newest epoch with changes of it that was committed."""
PARKED: Final = "parked/"
SUSPECT: Final = "suspect/"
ACCOUNTED: Final = "accounted"
"""The tables of which no generation has a commit under way that neither a token nor a fence accounts for."""

_LARGEST_STAGED: Final = 16 << 20

T = TypeVar("T")


# -- records -----------------------------------------------------------------------------------------------------------


class DeliveryState(Enum):
    PENDING = "pending"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """One batch.

    :ivar generation: of the processes that staged it. :ivar epoch: up to which it has changes. :ivar plan: its newest.
    :ivar tables: rows by table; a table of which nothing was left has 0. :ivar changed: those with changes.
    :ivar since_ms: when it came to its state.
    """

    number: int
    state: DeliveryState
    generation: int
    epoch: int
    plan: int
    tables: Mapping[str, int] = field(default_factory=dict)
    changed: Sequence[str] = ()
    since_ms: int = 0
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "generation": self.generation,
            "epoch": self.epoch,
            "plan": self.plan,
            "tables": dict(self.tables),
            "changed": list(self.changed),
            "since_ms": self.since_ms,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, number: int, value: dict[str, Any]) -> Self:
        return cls(number=number, **(value | {"state": DeliveryState(value["state"])}))


@dataclass(frozen=True, slots=True)
class ParkedTable:
    """A table that the sink does not take: why, what to do, and since when."""

    reason: str
    next_step: str | None
    since_ms: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_records(rows: StateTable, view: Snapshot) -> tuple[DeliveryRecord, ...]:
    """All of them, in order."""
    records = [DeliveryRecord.from_json(key[0], values[0]) for key, values in rows.scan(view, 0)]
    return tuple(sorted(records, key=lambda record: record.number))


def of_tables(state: StateTable, view: Snapshot, prefix: str) -> dict[str, Any]:
    """What is durable under *prefix*, by the names of the tables."""
    rows = state.scan(view, 0)
    return {key[0].removeprefix(prefix): value[0] for key, value in rows if key[0].startswith(prefix)}


def parked_tables(state: StateTable, view: Snapshot) -> dict[str, ParkedTable]:
    """The tables that are parked, by name."""
    return {name: ParkedTable(**value) for name, value in of_tables(state, view, PARKED).items()}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- from any process --------------------------------------------------------------------------------------------------


def read_deliveries(state: str, query: str) -> tuple[DeliveryRecord, ...]:
    """The records of *query*; none where it has delivered nothing."""
    with suppress(StoreNotFound), _reading(state, query, DELIVERIES) as (rows, view):
        return () if rows is None else read_records(rows, view)
    return ()


def read_parked(state: str, query: str) -> dict[str, ParkedTable]:
    """The tables that *query* has parked."""
    with suppress(StoreNotFound), _reading(state, query, DELIVERY_STATE) as (rows, view):
        return {} if rows is None else parked_tables(rows, view)
    return {}


def behind_of(
    state: str, query: str, backfill: str, sink: Sink, tables: Sequence[SourceTable]
) -> list[tuple[SourceTable, Committed]]:
    """The tables of which *sink* has less than what *query* committed to it, and what it has."""
    epochs: dict[str, int] = {}
    with suppress(StoreNotFound), _reading(state, query, DELIVERY_STATE) as (rows, view):
        epochs = {} if rows is None else of_tables(rows, view, TABLE)
    return [(table, has) for table, has in behind(sink, query, backfill, tables, epochs) if has != Committed()]


@contextmanager
def _reading(state: str, query: str, schema: TableSchema) -> Iterator[tuple[StateTable | None, Snapshot]]:
    """:raises StoreNotFound: no pipeline has run."""
    with QueryReader(state, query) as reader, reader.snapshot() as view:
        catalog = Catalog.load(view)
        yield catalog.open(schema) if schema.name in catalog.names() else None, view


def behind(
    sink: Sink, query: str, backfill: str, tables: Sequence[SourceTable], epochs: Mapping[str, int]
) -> Iterator[tuple[SourceTable, Committed]]:
    """The tables of which *sink* has less than *epochs* say, and what it has."""
    for table in tables:
        wanted = epochs.get(table.full_name, 0)
        if wanted:
            has = sink.committed(table, query, backfill)
            if has.epoch < wanted:
                yield table, has


def unpark(store: QueryStore, names: Collection[str]) -> None:
    """Let the parked tables *names* return with the next seal of *store*."""
    batch = WriteBatch()
    state = store.catalog.open_or_create(DELIVERY_STATE, batch)
    for name in names:
        state.delete(batch, 0, (f"{PARKED}{name}",))
    store.defer(batch)


# -- the tables of a batch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableFailure:
    """Why one table cannot be delivered; it can be pickled."""

    table: SourceTable
    reason: str
    next_step: str | None = None

    @classmethod
    def of(cls, table: SourceTable, error: BaseException) -> Self | None:
        """``None``: *error* is not about the table alone."""
        if isinstance(error, pa.ArrowInvalid | pa.ArrowTypeError | pa.ArrowNotImplementedError | pa.ArrowKeyError):
            reason = f"Values of {table.full_name} do not fit into the columns of the sink ({type(error).__name__})."
            return cls(table, reason)
        if not isinstance(error, SinkSchemaError | SinkRowError | UnsupportedTable | RefusedValue):
            return None
        return cls(table, error.message, error.next_step)


def by_table_of(staged: Sequence[Staged]) -> dict[str, list[Staged]]:
    """By the names of their tables."""
    tables: dict[str, list[Staged]] = {}
    for one in staged:
        tables.setdefault(one.table.full_name, []).append(one)
    return tables


def commit_tables(sink: Sink, by_table: Mapping[str, Sequence[Staged]]) -> dict[str, tuple[SourceTable, BaseException]]:
    """Commit each table; one that fails does not stop the others. Those that failed, and why."""
    failed: dict[str, tuple[SourceTable, BaseException]] = {}

    def commit(name: str, parts: Sequence[Staged]) -> None:
        token = max((one.token for one in parts), key=lambda one: one.attempt)
        try:
            sink.commit(parts[0].table, token, parts)
        except Exception as error:
            failed[name] = (parts[0].table, error)

    each(list(by_table.items()), lambda one: commit(*one), sink.capabilities.connections)
    return failed


def each(values: Sequence[T], function: Callable[[T], None], most: int) -> None:
    """Call *function* with each of *values*, up to *most* at a time; what it raises is raised when all have ended."""
    if len(values) < 2:
        for value in values:
            function(value)
        return
    with ThreadPoolExecutor(min(most, len(values)), "headwater-commit") as threads:
        calls = [threads.submit(function, value) for value in values]
    for call in calls:
        call.result()


def is_there(sink: Sink, staged: Sequence[Staged]) -> bool:
    """Whether the sink's token has come to this batch: not if it had the truncation, and there was nothing more."""
    token, table = staged[0].token, staged[0].table
    if any(one.rows for one in staged if not one.is_snapshot):
        return True
    return sink.committed(table, token.query, token.backfill).epoch >= token.epoch


def has_changes(staged: Staged) -> bool:
    """Whether it has more than history."""
    return not staged.is_snapshot and (staged.rows > 0 or staged.truncated is not None)


def packed(staged: Sequence[Staged]) -> bytes:
    """What a later process needs to commit it; nothing if it is too large, holds secrets, or cannot be encoded."""
    if any(one.order is not None for one in staged):  # it knows the address of the source
        return b""
    try:
        data = encode(staged)
    except NotStorable:
        return b""
    return data if len(data) <= _LARGEST_STAGED else b""
