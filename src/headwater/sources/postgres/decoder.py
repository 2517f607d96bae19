"""RowDecoder: the rows of a replication stream, from raw messages to columns of text.

:func:`make_decoder` gives the compiled one where it was built, else the Python one; both give the same.
``HEADWATER_PURE=1`` in the environment asks for Python.

What the server sends becomes rows like this:

=====================  =====================================================================================
message                rows
=====================  =====================================================================================
insert                 ``INSERT``
delete, whole row      ``DELETE``
delete, key            ``DELETE`` with nulls beside the key
update                 ``UPDATE_INSERT`` alone: the server did not tell the old row
update, old row        ``UPDATE_DELETE``, ``UPDATE_INSERT``; unchanged values are those of the old row
update, old key        ``DELETE`` with nulls beside the key, ``INSERT``
=====================  =====================================================================================

The server also tells an old key that is the new one, where the key is stored out of line: that is an ``UPDATE_INSERT``.
A value that the server did not send because it is unchanged and stored out of line (TOAST) is null, and marked in
``unchanged``.

Each row has a number in its transaction. An update with an old part takes two, whether or not both become rows, and so
do rows of ignored relations: the numbers depend on the transaction alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from headwater import compiled
from headwater.sources.postgres.python_decoder import PythonDecoder
from headwater.sources.postgres.raw_rows import RawColumn, RawRows, utf8_of

if TYPE_CHECKING:
    from headwater.sources.postgres._decoder import Decoder
else:
    try:
        from headwater.sources.postgres._decoder import Decoder
    except ImportError:
        Decoder = None

__all__ = ["CompiledDecoder", "PythonDecoder", "RawColumn", "RawRows", "RowDecoder", "is_compiled", "make_decoder"]


class RowDecoder(Protocol):
    """Turns raw messages into rows, and keeps them until they are taken.

    After an error the rows of all messages before the bad one are still held.

    :ivar next_seq: the number of the next row in the transaction. What else has a place there (a truncation) may take
        this one and set the next.
    """

    next_seq: int

    @property
    def held_rows(self) -> int: ...

    @property
    def held_bytes(self) -> int:
        """Of the messages whose rows are held."""
        ...

    @property
    def in_transaction(self) -> bool: ...

    @property
    def transaction(self) -> tuple[int, int, int] | None:
        """Commit LSN, commit time and xid of the transaction that is half way."""
        ...

    @property
    def last_commit(self) -> tuple[int, int, int] | None:
        """Commit LSN, end LSN and commit time of the newest commit that :meth:`feed` took."""
        ...

    def add_relation(self, oid: int, columns: int, key_columns: Sequence[int], /) -> None:
        """Rows of *oid* have so many columns from here on.

        :param key_columns: places of the columns that an old key has.
        :raises ValueError: rows of it are held.
        """
        ...

    def ignore_relation(self, oid: int, /) -> None:
        """Rows of *oid* are numbered and left out.

        :raises ValueError: rows of it are held.
        """
        ...

    def begin_streamed(self, commit_lsn: int, commit_time: int, xid: int, /) -> None:
        """The rows that follow are those of a streamed transaction, whose messages carry an xid.

        :raises SourceProtocolError: another transaction is half way.
        """
        ...

    def end_streamed(self) -> None:
        """The streamed transaction is complete.

        :raises SourceProtocolError: there is none.
        """
        ...

    def feed(self, messages: list[bytes], start: int, *, max_rows: int, max_bytes: int, stop_at_commit: bool) -> int:
        """Decode ``messages[start:]``; where it stopped.

        It stops at the end, at a message that is neither row, begin nor commit, after a commit if *stop_at_commit*, and
        before a row once *max_rows* or *max_bytes* are held.

        :raises SourceProtocolError: a message is malformed or cannot come here.
        """
        ...

    def take(self) -> list[RawRows]:
        """All rows that are held, by oid, and none is held any more.

        :raises SourceProtocolError: a value is no UTF-8.
        """
        ...


def make_decoder() -> RowDecoder:
    """The fastest decoder that there is."""
    return CompiledDecoder() if is_compiled() else PythonDecoder()


def is_compiled() -> bool:
    """Whether the compiled code was built and is not switched off by ``HEADWATER_PURE``."""
    return bool(Decoder) and compiled.is_wanted()


class CompiledDecoder(Decoder or object):  # type: ignore[misc]
    """The decoder in C; it can be made only where it was built."""

    def take(self) -> list[RawRows]:
        return [
            RawRows(
                oid,
                np.frombuffer(ops, np.int8),
                np.frombuffer(lsns, np.uint64),
                np.frombuffer(seqs, np.uint32),
                np.frombuffer(xids, np.uint32),
                np.frombuffer(times, np.int64),
                [_compiled_column(rows, *column) for column in columns],
            )
            for oid, rows, ops, lsns, seqs, xids, times, columns in self.take_buffers()
        ]


def _compiled_column(
    rows: int, data: bytes, offsets: bytes, validity: bytes | None, nulls: int, unchanged: bytes | None
) -> RawColumn:
    # Text that is ASCII is UTF-8: that is quicker seen over all values at once than Arrow sees it value by value.
    kind = pa.string() if data.isascii() else pa.binary()
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(data)]
    array = pa.Array.from_buffers(kind, rows, buffers, nulls)
    return RawColumn(utf8_of(array), None if unchanged is None else np.frombuffer(unchanged, np.bool_))
