"""Answer: the rows of one statement as Arrow columns, a block at a time.

The library logs in, sends the statement and reads what its columns are. Its way of taking rows makes an object of every
value, so from the first row on the bytes of the protocol are taken here, and decoded by compiled code; what follows the
rows, an end or an error, is given back to the library. Where the code is not compiled, or a column is of a kind that it
does not know (none that we ask for), the library's own rows are made columns.

What comes is plain: whole numbers as int64, others as double, texts and bytes; :mod:`.values` makes values of them.
Servers take half a surrogate pair in a text, which is no Unicode: it ends the answer, or is null if that is wanted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pytds.tds_types import PlpReader

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
_TEXTS: Final = frozenset((6, 7, 9, 10))
_LONG_TEXT: Final = 9
_BLOCK_BYTES: Final = 1 << 20
_PACKET_BYTES: Final = 1 << 16


class HalfPair(SourceProtocolError):
    """A text of an answer has half a surrogate pair. :ivar place: the number of its column, from 0."""

    def __init__(self, place: int) -> None:
        self.place = place
        super().__init__("A text of the server is no Unicode: it has half a surrogate pair.")


def columns_of_answer(cursor: Any, rows: int, forgiven: Collection[int] = ()) -> Iterator[list[pa.Array]]:
    """The columns of the rows that *cursor* has been asked for, at most so many *rows* at a time.

    :param forgiven: the numbers of the columns whose texts are null where they are no Unicode.
    :raises HalfPair: a text of the others is none. :raises SourceProtocolError: what came are no rows.
    """
    session = cursor._session
    kinds = _kinds_of(session, forgiven) if _DECODE is not None and compiled.is_wanted() else None
    if kinds is None:
        tell_half_pairs(cursor, forgiven)
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
            if len(error.args) == 2:
                raise HalfPair(error.args[1]) from None
            raise SourceProtocolError(f"An answer of the server cannot be read: {error}.") from None
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


def _kinds_of(session: Any, forgiven: Collection[int]) -> bytes | None:
    """Two bytes for each column of the answer; ``None`` where one is not known, or there is no answer."""
    if session.res_info is None or not session.more_rows:
        return None
    made = bytearray()
    for place, column in enumerate(session.res_info.columns):
        kind, width = _KINDS.get(type(column.serializer).__name__, (0, 0))
        if not kind:
            return None
        made += bytes((kind, 1 if kind in _TEXTS and place in forgiven else width))
    return bytes(made)


def tell_half_pairs(cursor: Any, forgiven: Collection[int] = ()) -> None:
    """Have the library's own rows tell which column has half a pair, as those of the compiled code do."""
    info = cursor._session.res_info
    for place, column in enumerate(() if info is None else info.columns):
        kind, _ = _KINDS.get(type(column.serializer).__name__, (0, 0))
        if kind in _TEXTS:
            column.serializer = _TextReader(column.serializer, kind == _LONG_TEXT, place, place in forgiven)


class _TextReader:
    """What reads a column of texts for the library."""

    def __init__(self, serializer: Any, is_long: bool, place: int, is_forgiven: bool) -> None:
        self._serializer, self._is_long, self._place, self._is_forgiven = serializer, is_long, place, is_forgiven

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serializer, name)

    def read(self, reader: Any) -> str | None:
        with contextlib.suppress(UnicodeDecodeError):  # whose text shows the value
            if not self._is_long:
                return self._serializer.read(reader)  # type: ignore[no-any-return]
            chunks = PlpReader(reader)  # all of them: the library stops at the one that it cannot decode
            return None if chunks.is_null() else b"".join(chunks.chunks()).decode("utf-16le")
        if not self._is_forgiven:
            raise HalfPair(self._place)
        return None


def _give_back(reader: Any, rest: bytes) -> None:
    """Let the library read *rest* next, as if it were what is left of the packet that it has read last."""
    if len(rest) > len(reader._buf):
        reader.set_block_size(len(rest))
    reader._buf[: len(rest)] = rest
    reader._pos, reader._size = 0, len(rest)


def _no_rows() -> SourceProtocolError:
    return SourceProtocolError("An answer of the server has rows where its end should be.")
