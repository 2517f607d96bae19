"""A log: the changes of one table, and how they are kept. Logs of all tables of a source share one state store.

The state table ``logs`` holds one row per log: its number, format, vnode count and every schema that it ever had, by
version. A chunk names the version of its schema, so a schema change needs no drained log. The format is that of new
epochs; each epoch's barrier names its own, so epochs of both formats may stand side by side while a log is migrated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from headwater.log_store import chunk_codec, row_codec
from headwater.log_store.columns import check_payload
from headwater.log_store.errors import ForeignSchema, LogNotFound, UnknownVersion
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.stream import DEFAULT_VNODE_COUNT, check_vnode_count

FORMATS = (row_codec.FORMAT, chunk_codec.FORMAT)
DEFAULT_FORMAT = chunk_codec.FORMAT

LOGS = TableSchema(
    "logs",
    1,
    key=(Field("name", FieldType.TEXT),),
    value=(
        Field("number", FieldType.INT),
        Field("format", FieldType.INT),
        Field("vnode_count", FieldType.INT),
        Field("key_columns", FieldType.JSON),
        Field("schemas", FieldType.BYTES),
        Field("rows_held", FieldType.BOOL),
    ),
)


@dataclass(frozen=True, slots=True)
class Log:
    """One log as it is registered.

    :ivar format: of the epochs that are written from now on.
    :ivar rows_held: older epochs of format 1 may be there still: a migration is not finished.
    :ivar key_since: the first schema version that has this key.
    """

    name: str
    number: int
    format: int
    vnode_count: int
    key_columns: tuple[str, ...]
    schemas: tuple[pa.Schema, ...]
    rows_held: bool = False
    key_since: int = 1

    @property
    def schema(self) -> pa.Schema:
        """The newest schema of the payload."""
        return self.schemas[-1]

    @property
    def schema_version(self) -> int:
        return len(self.schemas)

    @property
    def may_hold_rows(self) -> bool:
        """Whether there can be rows of format 1: what forgets epochs has to look there, too."""
        return self.rows_held or self.format == row_codec.FORMAT

    def in_format(self, log_format: int) -> Log:
        """The log when its next epochs are written in *log_format*."""
        return replace(self, format=log_format, rows_held=self.may_hold_rows)

    def schema_of(self, version: int) -> pa.Schema:
        """:raises UnknownVersion: a chunk of a schema that the log does not know."""
        if not 1 <= version <= len(self.schemas):
            raise UnknownVersion(f"Log {self.name!r} has no schema version {version}.")
        return self.schemas[version - 1]

    def with_schema(self, schema: pa.Schema, key_columns: tuple[str, ...] | None = None) -> Log:
        """The log after a schema change; the same log when nothing changes.

        :param key_columns: where a column of the key was renamed.
        """
        keys = self.key_columns if key_columns is None else key_columns
        if schema.equals(self.schema, check_metadata=True) and keys == self.key_columns:
            return self
        check_schema(self.format, schema, keys)
        made = replace(self, schemas=(*self.schemas, schema))
        return made if keys == self.key_columns else replace(made, key_columns=keys, key_since=made.schema_version)


def check_schema(log_format: int, schema: pa.Schema, key_columns: tuple[str, ...]) -> None:
    """:raises ForeignSchema: columns that a log of this format cannot hold, or a key that they do not have.
    :raises UnknownVersion: no such format.
    """
    if log_format not in FORMATS:
        raise UnknownVersion(f"Received log format {log_format}; valid are {' and '.join(map(str, FORMATS))}.")
    check_payload(schema)
    if log_format == row_codec.FORMAT:
        row_codec.check_flat(schema)
    for name in key_columns:
        if name not in schema.names or key_columns.count(name) > 1:
            raise ForeignSchema(
                f"Received key column {name!r}; valid are {', '.join(map(repr, schema.names)) or 'none'}, each once.",
                next_step="Check the primary key of the table.",
            )


class LogRegistry:
    """The logs of one store."""

    def __init__(self, table: StateTable, view: Snapshot) -> None:
        self._table = table
        self._view: Snapshot | None = view
        self._logs: dict[str, Log] = {}

    @classmethod
    def load(cls, view: Snapshot) -> LogRegistry:
        """For readers, while *view* is open; a log is decoded when it is asked for.

        :raises LogNotFound: the store holds no logs.
        """
        catalog = Catalog.load(view)
        if LOGS.name not in catalog.names():
            raise LogNotFound("This store holds no logs yet.")
        return cls(catalog.open(LOGS), view)

    @classmethod
    def load_or_create(cls, catalog: Catalog, view: Snapshot, batch: WriteBatch) -> LogRegistry:
        """For the writer; what is new goes into *batch*."""
        made = cls(catalog.open_or_create(LOGS, batch), view)
        made._load_all()
        return made

    def _load_all(self) -> None:
        if self._view is not None:
            found = {key[0]: _from_row(key[0], values) for key, values in self._table.scan(self._view, 0)}
            self._logs, self._view = found | self._logs, None

    def names(self) -> list[str]:
        self._load_all()
        return sorted(self._logs)

    def get(self, name: str) -> Log:
        """:raises LogNotFound: no such log."""
        found = self.find(name)
        if found is None:
            known = ", ".join(self.names()) or "none"
            raise LogNotFound(f"There is no log {name!r} in this store; there are: {known}.")
        return found

    def find(self, name: str) -> Log | None:
        if name not in self._logs and self._view is not None:
            row = self._table.get(self._view, 0, (name,))
            if row is not None:
                self._logs[name] = _from_row(name, row)
        return self._logs.get(name)

    def create(
        self,
        batch: WriteBatch,
        name: str,
        schema: pa.Schema,
        key_columns: tuple[str, ...],
        log_format: int = DEFAULT_FORMAT,
        vnode_count: int = DEFAULT_VNODE_COUNT,
    ) -> Log:
        """A new log, registered in *batch*; the one that exists, when it has the same schema.

        :raises ForeignSchema: the log exists with another schema, or these columns cannot be held.
        """
        check_schema(log_format, schema, key_columns)
        check_vnode_count(vnode_count)
        old = self._logs.get(name)
        if old is not None:
            if not schema.equals(old.schema) or key_columns != old.key_columns or vnode_count != old.vnode_count:
                raise ForeignSchema(
                    f"Log {name!r} exists with other columns, keys or vnodes.",
                    next_step="Change its schema at a barrier, or choose another name.",
                )
            return old
        number = max((log.number for log in self._logs.values()), default=0) + 1
        log = Log(name, number, log_format, vnode_count, key_columns, (schema,))
        self.update(batch, log)
        return log

    def update(self, batch: WriteBatch, log: Log) -> None:
        """Record a changed log in *batch*."""
        schemas = pa.BufferOutputStream()
        for schema in log.schemas:
            schemas.write(schema.serialize())
        written = bytes(schemas.getvalue())
        names = list(log.key_columns)
        key = names if log.key_since == 1 else {"columns": names, "since": log.key_since}
        values = (log.number, log.format, log.vnode_count, key, written, log.rows_held)
        self._table.put(batch, 0, (log.name,), values)
        self._logs[log.name] = log


def _from_row(name: str, values: tuple[object, ...]) -> Log:
    number, log_format, vnode_count, key, data, rows_held = values
    key_columns, key_since = (key["columns"], key["since"]) if isinstance(key, dict) else (key, 1)
    source = pa.BufferReader(data)
    schemas = []
    while source.tell() < source.size():
        schemas.append(pa.ipc.read_schema(source))
    return Log(
        name,
        number,  # type: ignore[arg-type]
        log_format,  # type: ignore[arg-type]
        vnode_count,  # type: ignore[arg-type]
        tuple(key_columns),  # type: ignore[arg-type]
        tuple(schemas),
        bool(rows_held),
        key_since,
    )
