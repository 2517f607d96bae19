"""The rows of a result without the compiled code: the same functions as ``_rows.c`` has, the same values, slower."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from headwater.sources.mysql.row_format import (
    ROWS_LAST,
    ROWS_LONG,
    ROWS_MORE,
    SEEN_FAR,
    SEEN_ODD,
    SEEN_UNFIT,
    SEEN_ZERO,
    Column,
    Kind,
    Wire,
)

Bytes = bytes | bytearray | memoryview

_MOST_PACKET: Final = 0xFFFFFF
_SENT: Final = {Wire.INT1: 1, Wire.INT2: 2, Wire.INT4: 4, Wire.INT8: 8, Wire.REAL4: 4, Wire.REAL8: 8}
_COUNTS: Final = {252: 2, 253: 3, 254: 8}
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = dt.date(1970, 1, 1).toordinal()


class _Special(Exception):
    """A value that the column does not have; its argument is why."""


def walk(block: Bytes, start: int, size: int) -> tuple[int, int]:
    """Where the whole packets of rows in ``[start, size)`` end, and why."""
    while start + 4 <= size:
        length = int.from_bytes(block[start : start + 3], "little")
        if length == _MOST_PACKET:
            return start, ROWS_LONG
        if size - start < 4 + length:
            break
        if length and block[start + 4] != 0:
            return start, ROWS_LAST
        start += 4 + length
    return start, ROWS_MORE


def decode(
    block: Bytes, size: int, columns: bytes, allocate: Callable[[int], Any]
) -> tuple[int, int, int, list[Column]]:
    """See ``decode`` of ``_rows.c``."""
    described = [tuple(columns[place : place + 4]) for place in range(0, len(columns), 4)]
    rows: list[bytes] = []
    consumed, stopped = len(block), ROWS_MORE
    if size < 0:
        rows.append(bytes(block))
    else:
        consumed, stopped = walk(block, 0, size)
        at = 0
        while at < consumed:
            length = int.from_bytes(block[at : at + 3], "little")
            rows.append(bytes(block[at + 4 : at + 4 + length]))
            at += 4 + length
    values: list[list[Any]] = [[] for _ in described]
    seen = [0] * len(described)
    for row in rows:
        _take_row(row, described, values, seen)
    made = [_column(one, kept, flags) for one, kept, flags in zip(described, values, seen, strict=True)]
    return consumed, len(rows), stopped, made


def _take_row(row: bytes, described: Sequence[tuple[int, ...]], values: list[list[Any]], seen: list[int]) -> None:
    at = 1 + (len(described) + 9) // 8
    if len(row) < at:
        raise ValueError("a row is cut")
    for place, (wire, kind, width, scale) in enumerate(described):
        if row[1 + ((place + 2) >> 3)] >> ((place + 2) & 7) & 1:
            values[place].append(None)
            continue
        at, sent = _taken(row, at, Wire(wire))
        try:
            values[place].append(_value(sent, Wire(wire), Kind(kind), width, scale))
        except _Special as why:
            seen[place] |= why.args[0]
            values[place].append(None)
    if at != len(row):
        raise ValueError("a row is longer than its columns")


def _taken(row: bytes, at: int, wire: Wire) -> tuple[int, bytes]:
    length = _SENT.get(wire)
    if length is None:
        if at >= len(row):
            raise ValueError("a row is cut")
        length, at = row[at], at + 1
        if wire is Wire.COUNTED and length > 250:
            width = _COUNTS.get(length, 0)
            if not width or at + width > len(row):
                raise ValueError("a row is cut")
            length, at = int.from_bytes(row[at : at + width], "little"), at + width
    if at + length > len(row):
        raise ValueError("a row is cut")
    return at + length, row[at : at + length]


def _value(sent: bytes, wire: Wire, kind: Kind, width: int, scale: int) -> Any:
    if kind in (Kind.SIGNED, Kind.UNSIGNED):
        return int.from_bytes(sent, "little", signed=kind is Kind.SIGNED)
    if kind is Kind.REAL:
        return struct.unpack("<f" if wire is Wire.REAL4 else "<d", sent)[0]
    if kind in (Kind.DATE, Kind.TIMESTAMP):
        us = _datetime(sent)
        return us // _DAY_US if kind is Kind.DATE else us
    if kind in (Kind.DAYTIME, Kind.DURATION):
        us = _time(sent)
        if kind is Kind.DAYTIME and not 0 <= us < _DAY_US:
            raise _Special(SEEN_FAR)
        return us
    if kind is Kind.DECIMAL:
        return _decimal(sent, width, scale)
    if kind is Kind.BOOL:
        if not set(sent) <= {0, 1}:
            raise _Special(SEEN_ODD)
        return any(sent)
    return sent


def _datetime(sent: bytes) -> int:
    if not sent:
        raise _Special(SEEN_ZERO)
    if len(sent) not in (4, 7, 11):
        raise _Special(SEEN_UNFIT)
    year, month, day = struct.unpack_from("<HBB", sent)
    try:
        days = dt.date(year, month, day).toordinal() - _EPOCH
    except ValueError:
        raise _Special(SEEN_UNFIT if month > 12 or year > 9999 else SEEN_ZERO) from None
    us = days * _DAY_US
    if len(sent) >= 7:
        us += ((sent[4] * 60 + sent[5]) * 60 + sent[6]) * 1_000_000
    return us + (int.from_bytes(sent[7:11], "little") if len(sent) == 11 else 0)


def _time(sent: bytes) -> int:
    if not sent:
        return 0
    if len(sent) not in (8, 12):
        raise _Special(SEEN_UNFIT)
    minus, days, hours, minutes, seconds = struct.unpack_from("<BIBBB", sent)
    us: int = days * _DAY_US + ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
    us += int.from_bytes(sent[8:12], "little") if len(sent) == 12 else 0
    return -us if minus else us


def _decimal(sent: bytes, width: int, scale: int) -> bytes:
    whole, _, fraction = sent.decode("latin-1").partition(".")
    digits = whole.lstrip("+-") + fraction.ljust(scale, "0")
    if len(fraction) > scale or not digits.isascii() or not digits.isdigit():
        raise _Special(SEEN_UNFIT)
    number = int(digits)
    try:
        return (-number if sent[:1] == b"-" else number).to_bytes(width, "little", signed=True)
    except OverflowError:
        raise _Special(SEEN_UNFIT) from None


def _column(described: tuple[int, ...], values: list[Any], seen: int) -> Column:
    kind, width = Kind(described[1]), described[2]
    if kind is Kind.BYTES:
        made = pa.array(values, pa.binary())
    elif kind is Kind.BOOL:
        made = pa.array(values, pa.bool_())
    elif kind is Kind.DECIMAL:
        made = pa.array(values, pa.binary(width))
    elif kind is Kind.REAL:
        made = pa.array(values, pa.float32() if width == 4 else pa.float64())
    else:
        signed = "u" if kind is Kind.UNSIGNED else ""
        made = pa.array(values, getattr(pa, f"{signed}int{8 * width}")())
    buffers = made.buffers()
    data = (buffers[2] or pa.py_buffer(b"")) if kind is Kind.BYTES else None
    return buffers[0], buffers[1], data, made.null_count, seen
