"""Decimals, dates and times of row events, one value at a time; ``_row_decoder.c`` does the same."""

from __future__ import annotations

import datetime as dt
from typing import Final, NamedTuple

from headwater.sources.mysql.binlog.cursor import protocol_error
from headwater.sources.mysql.binlog.row_layout import Wire

_DIGIT_BYTES: Final = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
_FRACTION_US: Final = (0, 10_000, 100, 1)
_EPOCH: Final = dt.date(1970, 1, 1).toordinal()
_DAYS_IN: Final = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
DAY_US: Final = 86_400_000_000


def decimal_size(precision: int, scale: int) -> int:
    """How many bytes a DECIMAL has."""
    whole = precision - scale
    return whole // 9 * 4 + _DIGIT_BYTES[whole % 9] + scale // 9 * 4 + _DIGIT_BYTES[scale % 9]


def decimal_digits(data: bytes, precision: int, scale: int) -> tuple[bool, str]:
    """Whether it is negative, and all its digits.

    :raises SourceProtocolError: some are none.
    """
    negative = not data[0] & 0x80
    value = int.from_bytes(data, "big") ^ (0x80 << 8 * (len(data) - 1))
    if negative:
        value ^= (1 << 8 * len(data)) - 1
    copy = value.to_bytes(len(data), "big")
    whole, place, digits = precision - scale, 0, []
    lengths = [
        *([whole % 9] if whole % 9 else []),
        *[9] * (whole // 9 + scale // 9),
        *([scale % 9] if scale % 9 else []),
    ]
    for length in lengths:
        size = _DIGIT_BYTES[length]
        group = int.from_bytes(copy[place : place + size], "big")
        place += size
        if group >= 10**length:
            raise protocol_error("a DECIMAL has digits that are none.")
        digits.append(f"{group:0{length}d}")
    return negative, "".join(digits)


def decimal_text(data: bytes, precision: int, scale: int) -> bytes:
    """As the server prints it."""
    negative, digits = decimal_digits(data, precision, scale)
    whole = digits[: precision - scale].lstrip("0") or "0"
    sign = "-" if negative and digits.strip("0") else ""
    return f"{sign}{whole}.{digits[precision - scale :]}".encode() if scale else f"{sign}{whole}".encode()


class Parts(NamedTuple):
    """A date and time as the server keeps it; the date may be none of the calendar."""

    year: int
    month: int
    day: int
    hour: int
    minute: int
    second: int
    us: int
    negative: bool = False

    @property
    def is_special(self) -> bool:
        """Whether the calendar does not have the date."""
        if self.year == 0 or self.month == 0 or self.day == 0:
            return True
        is_leap = self.year % 4 == 0 and (self.year % 100 != 0 or self.year % 400 == 0)
        return self.day > _DAYS_IN[self.month] + (self.month == 2 and is_leap)

    @property
    def days(self) -> int:
        """Since 1970."""
        return dt.date(self.year, self.month, self.day).toordinal() - _EPOCH

    @property
    def us_of_day(self) -> int:
        return ((self.hour * 60 + self.minute) * 60 + self.second) * 1_000_000 + self.us


def temporal_size(wire: Wire, digits: int) -> int:
    """How many bytes a date or time has."""
    fraction = (digits + 1) // 2
    sizes = {Wire.DATE: 3, Wire.TIME: 3, Wire.DATETIME: 8, Wire.TIMESTAMP: 4}
    return sizes.get(wire) or {Wire.TIME2: 3, Wire.DATETIME2: 5, Wire.TIMESTAMP2: 4}[wire] + fraction


def temporal_parts(data: bytes, wire: Wire, digits: int) -> Parts:
    """:raises SourceProtocolError: it is no date or time."""
    parts = _parts(data, wire, (digits + 1) // 2)
    most_hours = 838 if wire in (Wire.TIME, Wire.TIME2) else 23
    if (
        parts.month > 12
        or parts.year > 9999
        or parts.minute > 59
        or parts.second > 59
        or parts.us > 999_999
        or parts.hour > most_hours
    ):
        raise protocol_error("a date or time is none.")
    return parts


def _parts(data: bytes, wire: Wire, fraction: int) -> Parts:
    match wire:
        case Wire.DATE:
            value = int.from_bytes(data, "little")
            return Parts(value >> 9, value >> 5 & 15, value & 31, 0, 0, 0, 0)
        case Wire.DATETIME:
            date, time = divmod(int.from_bytes(data, "little"), 1_000_000)
            if date > 99991231:
                raise protocol_error("a DATETIME is none.")
            return Parts(date // 10000, date // 100 % 100, date % 100, time // 10000, time // 100 % 100, time % 100, 0)
        case Wire.TIME:
            value = int.from_bytes(data, "little", signed=True)
            size = abs(value)
            return Parts(0, 0, 0, size // 10000, size // 100 % 100, size % 100, 0, negative=value < 0)
        case Wire.TIMESTAMP:
            return _of_seconds(int.from_bytes(data, "little"), 0)
        case Wire.TIMESTAMP2:
            us = int.from_bytes(data[4:], "big") * _FRACTION_US[fraction]
            return _of_seconds(int.from_bytes(data[:4], "big"), us)
        case Wire.DATETIME2:
            value = int.from_bytes(data[:5], "big") - 0x80_0000_0000
            if value < 0:
                raise protocol_error("a DATETIME is none.")
            months, day = value >> 22, value >> 17 & 31
            us = int.from_bytes(data[5:], "big") * _FRACTION_US[fraction]
            return Parts(months // 13, months % 13, day, value >> 12 & 31, value >> 6 & 63, value & 63, us)
    # TIME2: one number, offset by half of its range; its fraction counts from below
    value = int.from_bytes(data, "big") - (1 << 8 * len(data) - 1)
    size, bits = abs(value), 8 * fraction
    us, size = (size & (1 << bits) - 1) * _FRACTION_US[fraction], size >> bits
    return Parts(0, 0, 0, size >> 12 & 1023, size >> 6 & 63, size & 63, us, negative=value < 0)


def _of_seconds(seconds: int, us: int) -> Parts:
    if seconds == 0 and us == 0:
        return Parts(0, 0, 0, 0, 0, 0, 0)  # the zero date
    days, time = divmod(seconds, 86400)
    date = dt.date.fromordinal(days + _EPOCH)
    return Parts(date.year, date.month, date.day, time // 3600, time % 3600 // 60, time % 60, us)


def temporal_text(parts: Parts, digits: int, *, has_date: bool = True, has_time: bool = True) -> bytes:
    """As the server prints it."""
    text = f"{parts.year:04d}-{parts.month:02d}-{parts.day:02d}" if has_date else ""
    if has_time:
        lead = f"{text} " if has_date else "-" if parts.negative else ""
        text = f"{lead}{parts.hour:02d}:{parts.minute:02d}:{parts.second:02d}"
        if digits:
            text += f".{parts.us // 10 ** (6 - digits):0{digits}d}"
    return text.encode()
