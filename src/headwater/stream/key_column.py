"""Key columns: which 64-bit words an Arrow value has, whatever its representation.

Two columns that hold the same logical value give the same words:

======================================  ==============================================================
Arrow types                             words
======================================  ==============================================================
int8…int64, uint8…uint64, decimals      the (unscaled) integer, two's complement, as few words as it needs
bool                                    0 or 1
float16, float32, float64               the bits as float64; -0.0 as 0.0; every NaN as one NaN
string, binary and their large, view    length, then the bytes as little-endian words
and fixed-size forms, arrow.uuid
date32, date64                          days since 1970
time32, time64                          microseconds since midnight
timestamp                               microseconds since 1970 (of the wall clock, if it has no zone)
duration                                microseconds
null, and a null of any type            one word of its own
dictionary, run-end encoded             as their values
======================================  ==============================================================

Nested types, intervals and other extension types are refused. Arrow holds numbers in the byte order of
the machine, so they are read as native numbers; byte strings are read as little-endian words everywhere.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.stream.errors import KeyTypeError
from headwater.stream.hash import NULL, PIECE, U64, fold, fold_bytes, fold_length

KEY_TYPES = (
    "int8 to int64",
    "uint8 to uint64",
    "decimal",
    "bool",
    "float",
    "string",
    "binary",
    "arrow.uuid",
    "date",
    "time",
    "timestamp",
    "duration",
    "dictionary of those",
)

_NAN = np.uint64(0x7FF8000000000000)
_DAY_MS = 86_400_000
# How many microseconds one tick is, or how many ticks one microsecond is (negative).
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": -1_000}


class KeyColumn(ABC):
    """One Arrow column that folds its values into the states of a block of rows."""

    __slots__ = ("_nulls",)

    def __init__(self, array: Any) -> None:
        self._nulls: NDArray[np.bool_] | None = None
        if array.null_count:
            self._nulls = array.is_null().to_numpy(zero_copy_only=False)

    def fold_into(self, state: U64, start: int, scratch: U64) -> None:
        """Take the rows from *start* on, as many as *state* has, into *state*."""
        if self._nulls is None:
            self._fold(state, start, scratch)
            return
        rows = np.flatnonzero(self._nulls[start : start + state.size])
        nulls = state[rows]
        self._fold(state, start, scratch)
        fold(nulls, NULL, scratch[: rows.size])
        state[rows] = nulls

    @abstractmethod
    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        """As :meth:`fold_into`; what it does to the states of null rows is thrown away."""


class _NullColumn(KeyColumn):
    __slots__ = ()

    def __init__(self, array: Any) -> None:
        self._nulls = np.ones(len(array), dtype=np.bool_)

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        pass


class _IntegerColumn(KeyColumn):
    """Signed integers of up to 64 bits and unsigned ones of up to 32: one word each."""

    __slots__ = ("_values",)

    def __init__(self, array: Any, values: NDArray[Any]) -> None:
        super().__init__(array)
        self._values = values

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        values = self._values[start : start + state.size].astype(np.int64, copy=False)
        fold(state, values.view(np.uint64), scratch)


class _TicksColumn(_IntegerColumn):
    """Times: one word each, brought to the unit that all representations share."""

    __slots__ = ("_factor",)

    def __init__(self, array: Any, values: NDArray[Any], factor: int) -> None:
        super().__init__(array, values)
        self._factor = factor

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        values = self._values[start : start + state.size].astype(np.int64, copy=False)
        if self._factor > 1:
            values = values * np.int64(self._factor)
        elif self._factor < 0:
            values = values // np.int64(-self._factor)
        fold(state, values.view(np.uint64), scratch)


class _FloatColumn(KeyColumn):
    __slots__ = ("_values",)

    def __init__(self, array: Any, values: NDArray[Any]) -> None:
        super().__init__(array)
        self._values = values

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        # A signalling NaN would warn; a sum with 0.0 turns -0.0 into 0.0 and leaves the rest.
        with np.errstate(all="ignore"):
            values = self._values[start : start + state.size].astype(np.float64) + 0.0
        words = values.view(np.uint64)
        words[np.isnan(values)] = _NAN
        fold(state, words, scratch)


class _WideColumn(KeyColumn):
    """Integers that may need more than one word: uint64 and decimals, as (rows, words) with the low word first."""

    __slots__ = ("_limbs", "_signed")

    def __init__(self, array: Any, limbs: U64, *, signed: bool) -> None:
        super().__init__(array)
        self._limbs = limbs
        self._signed = signed

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        limbs = self._limbs[start : start + state.size]
        counts = self._word_counts(limbs)
        if (counts == 1).all():
            fold(state, limbs[:, 0], scratch)
            return
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            inner = state[rows]
            fold_length(inner, count - 1)
            for place in range(count):
                # The word above an unsigned one is its sign: zero.
                word = limbs[rows, place] if place < limbs.shape[1] else np.uint64(0)
                fold(inner, word, scratch[: rows.size])
            state[rows] = inner

    def _word_counts(self, limbs: U64) -> NDArray[np.int64]:
        """How many words each value needs: a top word that only repeats the sign below it is dropped."""
        if not self._signed:
            return 1 + (limbs[:, 0] >> np.uint64(63)).astype(np.int64)
        signs = -(limbs >> np.uint64(63)).astype(np.int64)
        repeats = limbs[:, 1:].view(np.int64) == signs[:, :-1]
        dropped: NDArray[np.int64] = np.cumprod(repeats[:, ::-1], axis=1, dtype=np.int64).sum(axis=1)
        np.subtract(limbs.shape[1], dropped, out=dropped)
        return dropped


class _BytesColumn(KeyColumn):
    """Byte strings behind offsets."""

    __slots__ = ("_data", "_offsets")

    def __init__(self, array: Any, offsets: NDArray[Any], data: NDArray[np.uint8]) -> None:
        super().__init__(array)
        self._offsets = offsets
        self._data = data

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        offsets = self._offsets[start : start + state.size + 1].astype(np.int64)
        lengths = np.diff(offsets)
        if self._nulls is not None:
            # What lies under a null is anything, also a megabyte.
            lengths[self._nulls[start : start + state.size]] = 0
        fold_bytes(state, self._data, offsets[:-1], lengths)


class _FixedBytesColumn(KeyColumn):
    """Byte strings that all have one length."""

    __slots__ = ("_data", "_width")

    def __init__(self, array: Any, width: int, data: NDArray[np.uint8]) -> None:
        super().__init__(array)
        self._width = width
        self._data = data

    def _fold(self, state: U64, start: int, scratch: U64) -> None:
        width = self._width
        if width % 8 or not 0 < width <= PIECE:
            starts = np.arange(start, start + state.size, dtype=np.int64) * width
            fold_bytes(state, self._data, starts, np.full(state.size, width, dtype=np.int64))
            return
        fold_length(state, width)
        block = self._data[start * width : (start + state.size) * width]
        words = block.view("<u8").reshape(state.size, width // 8)
        for place in range(width // 8):
            fold(state, words[:, place], scratch)


def _buffer(array: Any, place: int, dtype: str, per_row: int = 1, extra: int = 0) -> NDArray[Any]:
    """The values of buffer *place* that belong to the rows of *array*, itself perhaps a slice."""
    buffer = array.buffers()[place]
    wanted = len(array) * per_row + extra
    if buffer is None or buffer.size == 0:
        return np.zeros(wanted, dtype=dtype)
    itemsize = np.dtype(dtype).itemsize
    return np.frombuffer(buffer, dtype=dtype, count=wanted, offset=array.offset * per_row * itemsize)


def plain(array: Any) -> Any:
    """*array* without encodings: no dictionary, no runs, no views, no arrow.uuid around its bytes."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array))
    if getattr(kind, "extension_name", None) == "arrow.uuid":
        return array.storage
    if kind == pa.string_view():
        return array.cast(pa.large_string())
    if kind == pa.binary_view():
        return array.cast(pa.large_binary())
    return array


def key_column(array: Any, name: str) -> KeyColumn:
    """The key column of one Arrow array.

    :raises KeyTypeError: a type that is not hashed.
    """
    array = plain(array)
    kind = array.type
    types = pa.types
    if types.is_null(kind):
        return _NullColumn(array)
    if types.is_uint64(kind):
        return _WideColumn(array, _buffer(array, 1, "u8").reshape(-1, 1), signed=False)
    if types.is_integer(kind):
        sign = "i" if types.is_signed_integer(kind) else "u"
        return _IntegerColumn(array, _buffer(array, 1, f"{sign}{kind.bit_width // 8}"))
    if types.is_boolean(kind):
        return _IntegerColumn(array, _buffer(array.cast(pa.uint8()), 1, "u1"))
    if types.is_floating(kind):
        return _FloatColumn(array, _buffer(array, 1, f"f{kind.bit_width // 8}"))
    if types.is_date32(kind):
        return _IntegerColumn(array, _buffer(array, 1, "i4"))
    if types.is_date64(kind):
        return _TicksColumn(array, _buffer(array, 1, "i8"), -_DAY_MS)
    if types.is_time(kind) or types.is_timestamp(kind) or types.is_duration(kind):
        values = _buffer(array, 1, f"i{kind.bit_width // 8}")
        return _TicksColumn(array, values, _MICROSECONDS[kind.unit])
    if types.is_decimal(kind):
        return _decimal_column(array)
    if types.is_fixed_size_binary(kind):
        width = kind.byte_width
        return _FixedBytesColumn(array, width, _buffer(array, 1, "u1", per_row=width))
    if types.is_binary(kind) or types.is_string(kind):
        return _bytes_column(array, "i4")
    if types.is_large_binary(kind) or types.is_large_string(kind):
        return _bytes_column(array, "i8")
    step = "Leave the column out of the key, or cast it to one of these types."
    if isinstance(kind, pa.BaseExtensionType):
        step = f"Cast the column to its storage type {kind.storage_type}, or leave it out of the key."
    raise KeyTypeError(name, str(kind), KEY_TYPES, next_step=step)


def _decimal_column(array: Any) -> KeyColumn:
    width = array.type.bit_width // 8
    if width <= 8:
        return _IntegerColumn(array, _buffer(array, 1, f"i{width}"))
    words = width // 8
    limbs = _buffer(array, 1, "u8", per_row=words).reshape(-1, words)
    return _WideColumn(array, limbs if sys.byteorder == "little" else limbs[:, ::-1], signed=True)


def _bytes_column(array: Any, offset_type: str) -> KeyColumn:
    data = array.buffers()[2]
    content = np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return _BytesColumn(array, _buffer(array, 1, offset_type, extra=1), content)
