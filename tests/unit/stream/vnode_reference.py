"""The key hash in plain Python, word by word as docs/formats/vnode.md defines it: slow, short, and without numpy."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

MASK = (1 << 64) - 1
SEED = 0xA54FF53A5F1D36F1
NULL = 0x510E527FADE682D1
LENGTH = 0x3C6EF372FE94F82B


def mix(x: int) -> int:
    x ^= x >> 32
    x = x * 0x6A09E667F3BCC909 & MASK
    x ^= x >> 29
    x = x * 0xBB67AE8584CAA73B & MASK
    return x ^ x >> 32


def fold(state: int, value: int | bytes | float | None) -> int:
    """One value: an integer (also every date and time, in its unit), bytes, a float, or null."""
    if value is None:
        return mix(state ^ NULL)
    if isinstance(value, float):
        bits = struct.unpack("<Q", struct.pack("<d", value + 0.0))[0]
        return mix(state ^ (bits if value == value else 0x7FF8000000000000))
    if isinstance(value, int):
        size = next(size for size in range(1, 5) if -(1 << 64 * size - 1) <= value < 1 << 64 * size - 1)
        state = state + LENGTH * (size - 1) & MASK
        for word in struct.unpack(f"<{size}Q", value.to_bytes(8 * size, "little", signed=True)):
            state = mix(state ^ word)
        return state
    return fold_words(state + LENGTH * len(value) & MASK, value)


def fold_words(state: int, data: bytes) -> int:
    if len(data) > 1024:
        pieces = [data[start : start + 1024] for start in range(0, len(data), 1024)]
        return fold_words(state, b"".join(struct.pack("<Q", fold(SEED, piece)) for piece in pieces))
    for start in range(0, max(len(data), 1), 8):
        state = mix(state ^ int.from_bytes(data[start : start + 8], "little"))
    return state


def hash_of(values: list[int | bytes | float | None]) -> int:
    state = SEED
    for value in values:
        state = fold(state, value)
    return state


def vnode_of_hash(key_hash: int, count: int) -> int:
    return (key_hash >> 32) * count >> 32


def wrapped(value: int) -> int:
    """A time that does not fit 64 bits in microseconds wraps around."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def logical(scalar: Any) -> int | bytes | float | None:
    """The value of an Arrow scalar, as :func:`fold` takes it."""
    kind = scalar.type
    if pa.types.is_dictionary(kind):
        return logical(scalar.value)
    value = scalar.as_py() if pa.types.is_null(kind) or not scalar.is_valid else Ellipsis
    if value is None:
        return None
    if pa.types.is_temporal(kind):
        return _temporal(kind, scalar.value)
    value = scalar.as_py()
    if isinstance(value, Decimal):
        sign, digits, exponent = value.as_tuple()
        assert exponent == -kind.scale
        return (-1 if sign else 1) * int("".join(map(str, digits)))
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, bool):
        return int(value)
    assert isinstance(value, int | float | bytes)
    return value


def _temporal(kind: Any, ticks: int) -> int:
    if pa.types.is_date32(kind):
        return ticks
    if pa.types.is_date64(kind):
        return ticks // 86_400_000
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
    return wrapped(ticks * 10**6 // per_second)


def hashes_of(rows: Any, key_columns: list[str]) -> list[int]:
    """The hash of every row of a RecordBatch or Table."""
    columns = [rows.column(name) for name in key_columns]
    return [hash_of([logical(column[row]) for column in columns]) for row in range(rows.num_rows)]
