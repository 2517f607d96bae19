"""SourceTable: a table of a source as the rest of Headwater sees it, whatever the database.

A column has a name, the Arrow type that its values take here, the type's text in the source, and a field id that stays
the same when the column is renamed. The key is what names a row: the log's vnodes and every sink go by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import pyarrow as pa

from headwater.sources.errors import UnsupportedTable

FIELD_ID: Final = b"headwater.field_id"
SOURCE_TYPE: Final = b"headwater.source_type"
DROPPED: Final = b"headwater.dropped"
SPECIAL_VALUES: Final = b"headwater.special_values"
"""Keys of the metadata of an Arrow field."""
_STOP_OF_BEFORE: Final = "error"
"""What older logs may call the policy ``stop``."""

POSITION_COLUMN: Final = "_position"
COMMIT_TIMESTAMP_COLUMN: Final = "_commit_timestamp"
UNAVAILABLE_COLUMN: Final = "_unavailable"
RESERVED_COLUMNS: Final = frozenset(
    (POSITION_COLUMN, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN, "_op", "_vnode", "_seq", "_epoch")
)
"""Names that a captured table's own columns may not have."""


class SpecialValues(Enum):
    """What happens to a value that the column's Arrow type does not have."""

    STOP = "stop"  # its table stops, alone
    NULL = "null"
    TEXT = "text"  # the column is exact text from the start
    PARK = "park"  # it is null in the log, and its row is kept apart from what a sink has

    @property
    def makes_null(self) -> bool:
        """Whether such a value is null here."""
        return self in (SpecialValues.NULL, SpecialValues.PARK)


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """One column.

    :ivar type: the Arrow type.
    :ivar source_type: the type as the source writes it, for example ``numeric(18,4)``.
    :ivar field_id: stays when the column is renamed; Postgres: ``attnum``.
    :ivar dropped: the source has the column no longer; here it stays, null from then on.
    """

    name: str
    type: pa.DataType
    source_type: str
    field_id: int
    nullable: bool = True
    special_values: SpecialValues = SpecialValues.STOP
    dropped: bool = False

    @property
    def field(self) -> pa.Field:
        """The Arrow field. It is always nullable: a delete may know the key alone."""
        metadata = {FIELD_ID: str(self.field_id).encode(), SOURCE_TYPE: self.source_type.encode()}
        if self.dropped:
            metadata[DROPPED] = b"1"
        if self.special_values is not SpecialValues.STOP:
            metadata[SPECIAL_VALUES] = self.special_values.value.encode()
        return pa.field(self.name, self.type, metadata=metadata)

    @classmethod
    def of_field(cls, field: pa.Field) -> SourceColumn:
        """The column that :attr:`field` was made of."""
        told = field.metadata
        special = told.get(SPECIAL_VALUES, b"").decode()
        return cls(
            field.name,
            field.type,
            told[SOURCE_TYPE].decode(),
            int(told[FIELD_ID]),
            special_values=SpecialValues.STOP if special in ("", _STOP_OF_BEFORE) else SpecialValues(special),
            dropped=DROPPED in told,
        )


@dataclass(frozen=True, slots=True)
class SourceTable:
    """One table.

    :ivar namespace: the schema (Postgres) or database (MySQL, MongoDB) that it is in.
    :ivar key_columns: names in key order; never empty.
    :ivar source_id: the source's own number of the table; Postgres: the oid of the relation that the stream names.
    :raises UnsupportedTable: no columns, no key, a name twice, a key column that is none, or a reserved name.
    """

    namespace: str
    name: str
    columns: tuple[SourceColumn, ...]
    key_columns: tuple[str, ...]
    source_id: int | None = None
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        object.__setattr__(self, "_places", {name: place for place, name in enumerate(names)})
        if len(self._places) != len(names):
            raise UnsupportedTable(self.full_name, "it has two columns of one name.")
        if not self.key_columns or len(set(self.key_columns)) != len(self.key_columns):
            raise UnsupportedTable(
                self.full_name,
                "it has no key.",
                next_step="Add a primary key, or set REPLICA IDENTITY to DEFAULT (of a key), a unique index or FULL.",
            )
        foreign = [name for name in self.key_columns if name not in self._places]
        if foreign:
            raise UnsupportedTable(self.full_name, f"its key column {foreign[0]!r} is not among its captured columns.")
        reserved = sorted(RESERVED_COLUMNS.intersection(names))
        if reserved:
            raise UnsupportedTable(
                self.full_name,
                f"the column name {reserved[0]!r} is taken by Headwater.",
                next_step="Rename the column, or leave it out of the capture.",
            )

    @classmethod
    def of_log(
        cls, namespace: str, name: str, schema: pa.Schema, key_columns: tuple[str, ...], source_id: int | None
    ) -> SourceTable:
        """The table whose log has *schema*."""
        columns = tuple(SourceColumn.of_field(field) for field in schema if field.name not in RESERVED_COLUMNS)
        return cls(namespace, name, columns, key_columns, source_id)

    @property
    def full_name(self) -> str:
        """``namespace.name``, each quoted where it is no plain lower-case name."""
        return ".".join(_quoted(part) for part in (self.namespace, self.name) if part)

    @property
    def parking(self) -> tuple[SourceColumn, ...]:
        """The columns whose special values park their rows: none of the key, without which a row has no place."""
        return tuple(
            one
            for one in self.columns
            if one.special_values is SpecialValues.PARK and not one.dropped and one.name not in self.key_columns
        )

    @property
    def key_places(self) -> tuple[int, ...]:
        """Where the key columns are among the columns, in key order."""
        return tuple(self._places[name] for name in self.key_columns)

    def column(self, name: str) -> SourceColumn:
        """:raises KeyError: there is no such column."""
        return self.columns[self._places[name]]

    @property
    def schema(self) -> pa.Schema:
        """The table's own columns."""
        return pa.schema([column.field for column in self.columns])

    def log_schema(self, position_type: pa.DataType) -> pa.Schema:
        """The columns of the table's log: its own, then position, commit time and what could not be known."""
        return pa.schema([*self.schema, *log_fields(position_type)])


def log_fields(position_type: pa.DataType) -> Iterable[pa.Field]:
    """The fields that a log has after the table's own columns."""
    return (
        pa.field(POSITION_COLUMN, position_type, nullable=False),
        pa.field(COMMIT_TIMESTAMP_COLUMN, pa.timestamp("us", tz="UTC")),
        pa.field(UNAVAILABLE_COLUMN, pa.string()),
    )


def _quoted(name: str) -> str:
    plain = name.isascii() and name.replace("_", "a").isalnum() and name == name.lower() and not name[0].isdigit()
    return name if plain else '"' + name.replace('"', '""') + '"'
