"""Errors of documents beside those of all sources."""

from __future__ import annotations

from headwater.errors import HeadwaterError, InputError
from headwater.sources.errors import InvalidKey, RefusedValue, SourceError


class UnreadableText(RefusedValue, InputError):
    """A text of a document is not UTF-8: MongoDB stores it, and neither Arrow nor JSON has it.

    :ivar table: name of the table. :ivar column: name of the column.
    """

    def __init__(self, table: str, column: str, path: str) -> None:
        self.table, self.column = table, column
        super().__init__(
            f"Table {table}, column {column!r} holds text that is not UTF-8, at {path}.",
            next_step=f"Repair it in the collection, or set special_values of {table}.{column} to null and restart;"
            f" then run: headwater resnapshot {table}",
        )


class KeyOfOtherType(InvalidKey):
    """The ``_id`` of a document is not of the type that the key column has, or there is none.

    :ivar found: what was found, as MongoDB names types.
    """

    def __init__(self, table: str, column: str, source_type: str, found: str) -> None:
        self.table, self.column, self.source_type, self.found = table, column, source_type, found
        HeadwaterError.__init__(
            self,
            f"Table {table}, key column {column!r} ({source_type}): the _id of a document is of another type: {found}.",
            next_step=f'Declare _id = "key" among the columns of {table}, which takes every type, and restart; then'
            f" run: headwater resnapshot {table}",
        )


class UnreadableKey(InvalidKey):
    """The ``_id`` of a document cannot be read, so that no part of its collection can begin or end there."""

    def __init__(self, table: str, reason: str) -> None:
        self.table, self.column = table, "_id"
        HeadwaterError.__init__(
            self,
            f"Table {table}: the _id of a document cannot be read: {reason}.",
            next_step="Insert the document under another _id and delete it (db.runCommand({validate: …}) checks the"
            f" collection), then run: headwater resnapshot {table}",
        )


class InvalidType(SourceError, InputError):
    """A column is declared as something that is no type, or not one for it.

    :ivar column: its name. :ivar declared: the text.
    """

    def __init__(self, column: str, declared: str, reason: str, *, next_step: str) -> None:
        self.column, self.declared = column, declared
        super().__init__(f"Column {column!r} cannot be declared as {declared!r}: {reason}.", next_step=next_step)
