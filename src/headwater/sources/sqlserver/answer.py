"""Answer: the rows of one statement as Arrow columns, a block at a time.

The library logs in, sends the statement and reads what its columns are. Its way of taking rows makes an object of every
value, so from the first row on the bytes of the protocol are taken here, and decoded by compiled code; what follows the
rows, an end or an error, is given back to the library. Where the code is not compiled, or a column is of a kind that it
does not know (none that we ask for), the library's own rows are made columns.

What comes is plain: whole numbers as int64, others as double, texts and bytes; :mod:`.values` makes values of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater import compiled
from headwater.sources.errors import SourceProtocolError

try:
    from headwater.sources.sqlserver import _tds_rows
except ImportError:  # no compiler was there
    _DECODE: Any = None
else:
    _DECODE = _tds_rows.decode

_WHOLE: Final = frozenset((1, 2))
_KINDS: Final = {
    "BitSerializer": (1, 1),
    "TinyIntSerializer": (1, 1),
    "SmallIntSerializer": (1, 2),
    "IntSerializer": (1, 4),
    "BigIntSerializer": (1, 8),
    "BitNSerializer": (2, 0),
    "IntNSerializer": (2, 0),
    "RealSerializer": (3, 4),
    "FloatSerializer": (3, 8),
    "FloatNSerializer": (4, 0),
    "VarBinarySerializer": (5, 0),
    "VarBinarySerializer72": (5, 0),
    "NVarChar71Serializer": (6, 0),
    "NVarChar72Serializer": (6, 0),
    "VarChar71Serializer": (7, 0),
    "VarChar72Serializer": (7, 0),
    "VarBinarySerializerMax": (8, 0),
    "NVarCharMaxSerializer": (9, 0),
    "VarCharMaxSerializer": (10, 0),
}
"""Kind and width, as the compiled code knows them, by how the library calls what reads a column."""
_BYTES: Final = frozenset((5, 8))
_BLOCK_BYTES: Final = 1 << 20
_PACKET_BYTES: Final = 1 << 16


def columns_of_answer(cursor: Any, rows: int) -> Iterator[list[pa.Array]]:
    """The columns of the rows that *cursor* has been asked for, at most so many *rows* at a time.

    :raises SourceProtocolError: what came are no rows, or a text is no Unicode.
    """
    session = cursor._session
    kinds = _kinds_of(session) if _DECODE is not None and compiled.is_wanted() else None
    if kinds is None:
        while block := cursor.fetchmany(rows):
            yield [pa.array(values) for values in zip(*block, strict=True)]
        return
    reader = session._reader
    held = bytearray()
    wanted = _BLOCK_BYTES
    while True:
        came: bytes | None = None
        while len(held) < wanted and came != b"":
            came = bytes(reader.recv(_PACKET_BYTES))
            held += came
        stopped = yield from _decoded(held, kinds, rows)
        if stopped or came == b"":
            break
        wanted = max(_BLOCK_BYTES, 2 * len(held))  # a row may be larger than a block
    _give_back(reader, bytes(held))
    if cursor.fetchone() is not None:
        raise _no_rows()


def _decoded(held: bytearray, kinds: bytes, rows: int) -> Any:
    """The rows that are all there, which leave *held*; whether another token follows them."""
    while held:
        try:
            count, taken, stopped, columns = _DECODE(held, kinds, rows)
        except ValueError as error:
            raise SourceProtocolError(
                f"An answer of the server cannot be read: {error}.",
                next_step="Look for texts with half a surrogate pair; capture the column as binary, or leave it out.",
            ) from None
        del held[:taken]
        if count:
            yield [_array(kinds[2 * place], count, *buffers) for place, buffers in enumerate(columns)]
        if stopped:
            return True
        if not taken:
            return False
    return False


def _array(kind: int, rows: int, valid: bytes, values: bytes, offsets: bytes | None) -> pa.Array:
    flags = np.frombuffer(valid, np.uint8)
    bitmap = None if flags.all() else pa.py_buffer(np.packbits(flags, bitorder="little").tobytes())
    if offsets is not None:
        made = pa.binary() if kind in _BYTES else pa.string()
        return pa.Array.from_buffers(made, rows, [bitmap, pa.py_buffer(offsets), pa.py_buffer(values)])
    return pa.Array.from_buffers(pa.int64() if kind in _WHOLE else pa.float64(), rows, [bitmap, pa.py_buffer(values)])


def _kinds_of(session: Any) -> bytes | None:
    """Two bytes for each column of the answer; ``None`` where one is not known, or there is no answer."""
    if session.res_info is None or not session.more_rows:
        return None
    found: Sequence[tuple[int, int] | None] = [
        _KINDS.get(type(column.serializer).__name__) for column in session.res_info.columns
    ]
    return None if None in found else bytes(byte for pair in found if pair is not None for byte in pair)


def _give_back(reader: Any, rest: bytes) -> None:
    """Let the library read *rest* next, as if it were what is left of the packet that it has read last."""
    if len(rest) > len(reader._buf):
        reader.set_block_size(len(rest))
    reader._buf[: len(rest)] = rest
    reader._pos, reader._size = 0, len(rest)


def _no_rows() -> SourceProtocolError:
    return SourceProtocolError("An answer of the server has rows where its end should be.")
