"""Errors of documents beside those of all sources."""

from __future__ import annotations

from headwater.errors import InputError
from headwater.sources.errors import SourceError


class UnreadableText(SourceError, InputError):
    """A text of a document is not UTF-8: MongoDB stores it, and neither Arrow nor JSON has it.

    :ivar table: name of the table. :ivar column: name of the column.
    """

    def __init__(self, table: str, column: str, path: str) -> None:
        self.table, self.column = table, column
        super().__init__(
            f"Table {table}, column {column!r} holds text that is not UTF-8, at {path}.",
            next_step=f"Repair it in the collection, or capture with --special-values {table}.{column}=null.",
        )


class InvalidType(SourceError, InputError):
    """A column is declared as something that is no type, or not one for it.

    :ivar column: its name. :ivar declared: the text.
    """

    def __init__(self, column: str, declared: str, reason: str, *, next_step: str) -> None:
        self.column, self.declared = column, declared
        super().__init__(f"Column {column!r} cannot be declared as {declared!r}: {reason}.", next_step=next_step)
