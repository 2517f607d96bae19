"""Key positions: where a row stands in its table, as bytes that sort as ``(vnode, key)`` does. Pure, nothing per row.

A position is the vnode in two bytes, big-endian, and the key as :mod:`headwater.state.key_encoding` writes it, but for
decimals: those of one type are 16 or 32 bytes, big-endian, with the sign bit flipped. Times are 8 bytes of ticks of
their type; binaries of a fixed size are those bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from headwater.log_store.columns import VNODE
from headwater.versioned.errors import UnsupportedKey

U8 = NDArray[np.uint8]

_PRESENT: Final = 1
_NULL: Final = b"\x02"
_SIGN64: Final = np.uint64(1 << 63)
_SIGN32: Final = np.uint32(1 << 31)


def check_key(name: str, kind: pa.DataType) -> None:
    """:raises UnsupportedKey: a key column of this type has no order here."""
    _encoded(name, pa.nulls(0, kind))


def positions(rows: pa.RecordBatch, key_columns: Sequence[str]) -> pa.BinaryArray:
    """The position of each row; it has its vnode in the column ``_vnode``."""
    vnodes = rows.column(VNODE).to_numpy().astype(">u2").view(np.uint8).reshape(-1, 2)
    return _joined([vnodes, *(_encoded(name, rows.column(name)) for name in key_columns)], rows.num_rows)


def keys(rows: pa.RecordBatch, key_columns: Sequence[str]) -> pa.BinaryArray:
    """The position of each row within its vnode."""
    return _joined([_encoded(name, rows.column(name)) for name in key_columns], rows.num_rows)


def vnode_position(vnode: int) -> bytes:
    """Before every position of *vnode*, and after those of the vnodes before it."""
    return vnode.to_bytes(2, "big")


def _joined(parts: Sequence[U8 | pa.BinaryArray], rows: int) -> pa.BinaryArray:
    if all(isinstance(part, np.ndarray) for part in parts):
        return _binary(np.hstack(parts) if len(parts) > 1 else parts[0])
    whole: list[Any] = []
    fixed: list[U8] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            fixed.append(part)
            continue
        if fixed:
            whole.append(_binary(np.hstack(fixed)))
            fixed = []
        whole.append(part)
    if fixed:
        whole.append(_binary(np.hstack(fixed)))
    return pc.binary_join_element_wise(*whole, b"") if len(whole) > 1 else whole[0]


def _binary(matrix: U8) -> pa.BinaryArray:
    rows, width = matrix.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32) if width else np.zeros(rows + 1, np.int32)
    data = pa.py_buffer(np.ascontiguousarray(matrix))
    return pa.BinaryArray.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])


def _encoded(name: str, values: Any) -> U8 | pa.BinaryArray:
    """A column as a matrix of bytes, or as texts of any length."""
    kind = values.type
    if getattr(kind, "extension_name", None) == "arrow.uuid":
        return _encoded(name, values.storage)
    if _is_text(kind):
        return _text(values)
    plain = values.fill_null(_zero(kind)) if values.null_count else values
    matrix = _matrix(name, plain)
    tagged = np.empty((len(values), matrix.shape[1] + 1), np.uint8)
    tagged[:, 0] = _PRESENT
    tagged[:, 1:] = matrix
    if not values.null_count:
        return tagged
    return pc.if_else(values.is_valid(), _binary(tagged), pa.scalar(_NULL, pa.binary()))


def _is_text(kind: pa.DataType) -> bool:
    kinds = (pt.is_string, pt.is_large_string, pt.is_string_view, pt.is_binary, pt.is_large_binary, pt.is_binary_view)
    return any(is_one(kind) for is_one in kinds)


def _text(values: Any) -> pa.BinaryArray:
    plain = values.cast(pa.binary())
    if pc.any(pc.match_substring(plain, b"\x00")).as_py():
        plain = pc.replace_substring(plain, b"\x00", b"\x00\xff")
    made = pc.binary_join_element_wise(b"\x01", plain, b"\x00\x00", b"")
    return made if not values.null_count else pc.fill_null(made, _NULL)


def _zero(kind: pa.DataType) -> Any:
    if pt.is_fixed_size_binary(kind):
        return pa.scalar(bytes(kind.byte_width), kind)
    return pa.array([False if pt.is_boolean(kind) else 0], kind)[0]


def _matrix(name: str, values: Any) -> U8:
    kind = values.type
    if pt.is_boolean(kind):
        return _bytes(values.cast(pa.uint8()).to_numpy(), 1)
    if pt.is_unsigned_integer(kind):
        return _bytes(values.to_numpy().astype(">u8"), 8)
    if pt.is_date(kind):
        days = values.cast(pa.date32()).cast(pa.int32()).to_numpy()
        return _bytes((days.view(np.uint32) ^ _SIGN32).astype(">u4"), 4)
    if pt.is_time32(kind):
        return _bytes(values.cast(pa.int32()).to_numpy().astype(">u8"), 8)
    if pt.is_time64(kind):
        return _bytes(values.cast(pa.int64()).to_numpy().astype(">u8"), 8)
    if pt.is_signed_integer(kind) or pt.is_timestamp(kind) or pt.is_duration(kind):
        words = values.cast(pa.int64()).to_numpy().view(np.uint64)
        return _bytes((words ^ _SIGN64).astype(">u8"), 8)
    if pt.is_floating(kind):
        return _float(values.cast(pa.float64()).to_numpy())
    if pt.is_decimal(kind):
        return _decimal(values)
    if pt.is_fixed_size_binary(kind):
        width = kind.byte_width
        return np.frombuffer(values.buffers()[1], np.uint8, len(values) * width, values.offset * width).reshape(
            -1, width
        )
    raise UnsupportedKey(
        f"Key column {name!r} has type {kind}, which has no order here.",
        next_step="Leave the table out of this sink, or give it a primary key of other types.",
    )


def _bytes(words: Any, width: int) -> U8:
    made: U8 = np.ascontiguousarray(words).view(np.uint8).reshape(-1, width)
    return made


def _float(values: NDArray[np.float64]) -> U8:
    bits = (values + 0.0).view(np.uint64)
    flipped = np.where(bits & _SIGN64 != 0, ~bits, bits ^ _SIGN64)
    flipped[np.isnan(values)] = np.uint64(0xFFFFFFFFFFFFFFFF)
    return _bytes(flipped.astype(">u8"), 8)


def _decimal(values: Any) -> U8:
    kind = values.type
    if kind.bit_width < 128:
        values = values.cast(pa.decimal128(kind.precision, kind.scale))
    words = values.type.bit_width // 64
    raw = np.frombuffer(values.buffers()[1], np.uint64, len(values) * words, values.offset * words * 8)
    turned = raw.reshape(-1, words)[:, ::-1].copy()
    turned[:, 0] ^= _SIGN64
    return _bytes(turned.astype(">u8"), words * 8)
