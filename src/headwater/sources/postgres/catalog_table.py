"""A table as the server's catalog has it, and the rules by which it can be captured.

The key of a table is what the log can tell of an old row, so it follows the replica identity:

==================  ==========================================================
replica identity    key
==================  ==========================================================
``DEFAULT``         the primary key, if it is not deferrable
``USING INDEX i``   the columns of *i*, also where there is a primary key
``FULL``            the primary key, else all columns
``NOTHING``         none: refused
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headwater.sources.errors import UnsupportedTable
from headwater.sources.postgres.catalog_types import CatalogType
from headwater.sources.postgres.names import TableName, literal, quoted


class Generated(Enum):
    """Whether a column's value is computed. Postgres logs stored ones from 18 on, and virtual ones never."""

    NO = ""
    STORED = "s"
    VIRTUAL = "v"


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column of a table.

    :ivar number: ``attnum``: stays when the column is renamed, and is never used again.
    :ivar type_text: the type as the database writes it, for example ``numeric(18,4)`` or ``public.mood[]``.
    :ivar missing: the text that rows from before the column have, where it was added with a constant default.
    :ivar toasted: large values of it may be kept apart, and an update need not tell them.
    """

    number: int
    name: str
    type: CatalogType
    typmod: int
    type_text: str
    not_null: bool
    generated: Generated
    identity: bool
    missing: str | None
    toasted: bool


class ReplicaIdentity(Enum):
    """What the server logs of an old row."""

    DEFAULT = "d"
    INDEX = "i"
    FULL = "f"
    NOTHING = "n"


@dataclass(frozen=True, slots=True)
class CatalogIndex:
    """A unique index that could name rows: no expression, no condition, checked at once."""

    name: str
    columns: tuple[str, ...]
    primary: bool
    identity: bool


@dataclass(frozen=True, slots=True)
class Partition:
    """A leaf of a partitioned table. :ivar access: see :class:`CatalogTable`."""

    oid: int
    name: TableName
    kind: str
    persistence: str
    identity: ReplicaIdentity
    identity_columns: tuple[str, ...]
    access: str | None = "heap"


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table.

    :ivar kind: ``relkind``: ``r`` a table, ``p`` a partitioned one.
    :ivar persistence: ``p`` logged, ``u`` unlogged, ``t`` temporary.
    :ivar ancestors: the partitioned tables that it is a part of, nearest first.
    :ivar leaves: of a partitioned table, those that hold rows, of all levels.
    :ivar numbers: how many columns it ever had, dropped ones among them.
    :ivar row_security: policies hide rows from this user.
    :ivar rows: as the last ANALYZE saw them; negative when never.
    :ivar access: the table access method; ``None`` of what has none.
    """

    oid: int
    name: TableName
    kind: str
    persistence: str
    owner: str
    owned: bool
    selectable: bool
    row_security: bool
    inherited: bool
    identity: ReplicaIdentity
    numbers: int
    columns: tuple[CatalogColumn, ...]
    indexes: tuple[CatalogIndex, ...]
    ancestors: tuple[TableName, ...]
    leaves: tuple[Partition, ...]
    rows: int
    access: str | None = "heap"

    @property
    def is_partitioned(self) -> bool:
        return self.kind == "p"

    @property
    def from_sql(self) -> str:
        """For FROM: rows of tables that inherit from a plain table are not its own."""
        return self.name.sql if self.is_partitioned else f"ONLY {self.name.sql}"

    @property
    def primary_key(self) -> tuple[str, ...]:
        """Its columns in index order, empty where there is none or it is deferrable."""
        return next((index.columns for index in self.indexes if index.primary), ())

    @property
    def identity_columns(self) -> tuple[str, ...]:
        """What the log tells of an old row at least; empty where it tells nothing."""
        if self.identity is ReplicaIdentity.FULL:
            return tuple(column.name for column in self.columns)
        if self.identity is ReplicaIdentity.INDEX:
            return next((index.columns for index in self.indexes if index.identity), ())
        return self.primary_key if self.identity is ReplicaIdentity.DEFAULT else ()

    def captured_columns(self, published: Sequence[str] | None, *, stored_generated: bool) -> list[CatalogColumn]:
        """The columns whose values the log tells.

        :param published: the publication's column list; ``None`` where it has none.
        :param stored_generated: whether the publication publishes generated columns that are stored.
        """
        told = {Generated.NO, Generated.STORED} if stored_generated else {Generated.NO}
        if published is not None:
            return [column for column in self.columns if column.name in published]
        return [column for column in self.columns if column.generated in told]

    def key_columns(self, captured: Sequence[CatalogColumn]) -> tuple[str, ...]:
        """What names a row, of the columns that are captured.

        :raises UnsupportedTable: nothing does; the statement that changes it.
        """
        self.require_identity()
        if self.identity is ReplicaIdentity.FULL and not self.primary_key:
            return tuple(column.name for column in captured)
        key = self.primary_key if self.identity is not ReplicaIdentity.INDEX else self.identity_columns
        left_out = sorted(set(key) - {column.name for column in captured})
        if left_out:
            raise UnsupportedTable(
                str(self.name),
                f"its key column {left_out[0]!r} is not in the log (generated, or not in the publication).",
                next_step="Name a unique index of logged columns:"
                f" ALTER TABLE {self.name.sql} REPLICA IDENTITY USING INDEX …;",
            )
        return key

    def require_capturable(self) -> None:
        """Look whether its changes are in the log at all, and all of them.

        :raises UnsupportedTable: they are not; what to do.
        """
        name = str(self.name)
        if self.kind not in ("r", "p"):
            what = _KINDS.get(self.kind, "not a table")
            raise UnsupportedTable(name, f"it is {what}.", next_step="Replace it with a table.")
        if self.persistence == "t":
            raise UnsupportedTable(name, "it is temporary, and its changes are not logged.")
        if self.persistence == "u":
            raise UnsupportedTable(
                name,
                "it is unlogged, so its changes are in no log.",
                next_step=f"Run: ALTER TABLE {self.name.sql} SET LOGGED;",
            )
        if self.kind == "r" and self.access != "heap":
            raise _not_heap(name, "it", self.name, self.access)
        for leaf in self.leaves:
            if leaf.kind == "f":
                raise UnsupportedTable(
                    name,
                    f"its partition {leaf.name} is a foreign table, whose changes are not in this server's log.",
                    next_step="Detach that partition, or name the other partitions one by one.",
                )
            if leaf.persistence != "p":
                raise UnsupportedTable(
                    name,
                    f"its partition {leaf.name} is unlogged, so its changes are in no log.",
                    next_step=f"Run: ALTER TABLE {leaf.name.sql} SET LOGGED;",
                )
            if leaf.access != "heap":
                raise _not_heap(name, f"its partition {leaf.name}", leaf.name, leaf.access)

    def require_identity(self) -> None:
        """Look whether the log tells which row an update or delete was of.

        Without it the server refuses such statements of the application once the table is published.

        :raises UnsupportedTable: it does not; the statement that changes it.
        """
        if not self.identity_columns:
            raise UnsupportedTable(str(self.name), self._no_identity(), next_step=f"Run: {self.identity_fix}")
        key = self.primary_key if self.identity is not ReplicaIdentity.INDEX else ()
        needed = set(key or self.identity_columns)
        others = [leaf for leaf in self._without_full_identity if not needed <= set(leaf.identity_columns)]
        if others:
            words = "DEFAULT" if self.identity is ReplicaIdentity.DEFAULT else "FULL"
            fix = " ".join(f"ALTER TABLE {leaf.name.sql} REPLICA IDENTITY {words};" for leaf in others)
            raise UnsupportedTable(
                str(self.name),
                f"its partition {others[0].name} has another replica identity than the table.",
                next_step=f"Run: {fix}",
            )

    @property
    def _without_full_identity(self) -> list[Partition]:
        return [leaf for leaf in self.leaves if leaf.identity is not ReplicaIdentity.FULL]

    def _no_identity(self) -> str:
        if self.identity is ReplicaIdentity.NOTHING:
            return "its replica identity is NOTHING, so the log does not tell which row an update or delete was of."
        return "it has no primary key, so the log does not tell which row an update or delete was of."

    @property
    def identity_fix(self) -> str:
        """The statements that give the table a replica identity; without a key its partitions need their own."""
        if self.primary_key:
            return f"ALTER TABLE {self.name.sql} REPLICA IDENTITY DEFAULT;"
        unique = next((index for index in self.indexes if not index.primary), None)
        if unique is not None and not self.leaves:
            return f"ALTER TABLE {self.name.sql} REPLICA IDENTITY USING INDEX {quoted(unique.name)};"
        names = [self.name, *(leaf.name for leaf in self._without_full_identity)]
        return " ".join(f"ALTER TABLE {name.sql} REPLICA IDENTITY FULL;" for name in names)


_KINDS = {
    "v": "a view, which has no changes of its own",
    "m": "a materialized view, whose changes are not published",
    "f": "a foreign table, whose changes are not in this server's log",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
    "t": "a TOAST table",
}


def _not_heap(table: str, what: str, stored: TableName, access: str | None) -> UnsupportedTable:
    """Logical decoding reads the log of heap tables: rows of others are in no change that a slot sends."""
    fix = f"ALTER TABLE {stored.sql} SET ACCESS METHOD heap;"
    if access == "columnar":  # of Citus, which converts distributed tables by its own function
        fix = f"SELECT alter_table_set_access_method({literal(stored.sql)}, 'heap');"
    return UnsupportedTable(
        table,
        f"{what} is stored by the access method {access!r}, whose rows logical replication does not send.",
        next_step=f"Run: {fix}",
    )
