"""What can be wrong with a value of the vocabulary.

Each error is an :class:`~headwater.errors.InputError`: nothing happened, the caller fixes the argument.
The facts are fields; a row is named by its index, never by its values.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.errors import InputError


class EpochError(InputError):
    """A number, time or pair that is not an epoch.

    :ivar value: the number that was refused.
    """

    def __init__(self, message: str, *, value: int, next_step: str) -> None:
        self.value = value
        super().__init__(message, next_step=next_step)


class BarrierError(InputError):
    """A barrier or mutation whose parts contradict each other."""


class FormatError(InputError):
    """A text that is not the JSON form of what was asked for.

    :ivar what: the name of the value that was being read.
    :ivar reason: what is wrong with the text.
    """

    def __init__(self, what: str, reason: str, *, next_step: str | None = None) -> None:
        self.what = what
        self.reason = reason
        super().__init__(
            f"This is not the JSON form of a {what}: {reason}.",
            next_step=next_step or "Check that the text is whole and was written by this or an older release.",
        )


class VnodeCountError(InputError):
    """A vnode count outside 1…32768.

    :ivar count: the count that was refused.
    """

    def __init__(self, count: object, most: int) -> None:
        self.count = count
        super().__init__(
            f"Received vnode count {count!r}; valid values are the integers 1 to {most}.",
            next_step="Use the count that the table was created with (256 by default).",
        )


class VnodeRangeError(InputError):
    """A vnode that is not below the vnode count.

    :ivar vnode: the vnode that was refused.
    :ivar count: the vnode count.
    """

    def __init__(self, vnode: int, count: int) -> None:
        self.vnode = vnode
        self.count = count
        super().__init__(
            f"Received vnode {vnode}; valid values are 0 to {count - 1}.",
            next_step="Hash the keys with the same vnode count as the bitmap's.",
        )


class BitmapError(InputError):
    """Bitmaps that do not fit together, or a text that is not a bitmap."""


class KeyColumnError(InputError):
    """A key column that is missing, ambiguous, or of a type that has no vnode.

    :ivar column: the name of the column.
    """

    def __init__(self, message: str, *, column: str, next_step: str) -> None:
        self.column = column
        super().__init__(message, next_step=next_step)


class KeyTypeError(KeyColumnError):
    """A key column of a type that is not hashed.

    :ivar column: the name of the column.
    :ivar type_name: its Arrow type.
    :ivar valid: the types that are hashed.
    """

    def __init__(self, column: str, type_name: str, valid: Sequence[str], *, next_step: str) -> None:
        self.type_name = type_name
        self.valid = tuple(valid)
        super().__init__(
            f"Received key column {column!r} of type {type_name}; valid types are {', '.join(valid)}.",
            column=column,
            next_step=next_step,
        )


class ChunkError(InputError):
    """Rows, ops and vnodes that do not make a chunk.

    :ivar row: the index of the first offending row, or None where it is not about one row.
    """

    def __init__(self, message: str, *, row: int | None = None, next_step: str) -> None:
        self.row = row
        super().__init__(message, next_step=next_step)
