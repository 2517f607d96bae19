"""The values of SQL Server's types as the double keeps them: as the server would print them. Pure."""

from __future__ import annotations

import datetime as dt
import re
import struct
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final

TICKS: Final = 10_000_000
_TYPE: Final = re.compile(r"\s*([a-z_0-9]+)\s*(?:\(\s*(max|\d+)\s*(?:,\s*(\d+)\s*)?\))?", re.IGNORECASE)
_TIME: Final = re.compile(
    r"(?:(\d{4})-?(\d\d)-?(\d\d))?[ T]?(?:(\d\d?):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?)?\s*(Z|[+-]\d\d:\d\d)?"
)
_DIGITS: Final = {"datetime2": 7, "time": 7, "datetimeoffset": 7}
_EXACT: Final = Context(prec=60)


_WIDE: Final = ("nchar", "nvarchar")
_HALF: Final = "\ud83d"
HALF: Final = "\ufdd0"
"""Stands for half a surrogate pair, which SQLite does not take; clients are sent the half."""


def as_sent(text: str) -> bytes:
    """UTF-16 as servers send it, whatever is in it."""
    return text.replace(HALF, _HALF).encode("utf-16le", "surrogatepass")


def parse_type(text: str) -> tuple[str, int, int]:
    """Name, size (-1: max) and scale."""
    found = _TYPE.match(text)
    assert found is not None, text
    name = found[1].lower()
    size = -1 if (found[2] or "").lower() == "max" else int(found[2] or _DIGITS.get(name, 0))
    if name in ("decimal", "numeric") and not found[2]:
        size = 18
    if name in ("char", "varchar", "nchar", "nvarchar", "binary", "varbinary") and not found[2]:
        size = 1
    return name, size, int(found[3] or 0)


def moment(text: str) -> tuple[int, int, int | None]:
    """Days since 1970, ticks of the day, and minutes from UTC."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError("no time")
    year, month, day, hour, minute, second, fraction, offset = found.groups()
    days = (dt.date(int(year), int(month), int(day)) - dt.date(1970, 1, 1)).days if year else 0
    ticks = ((int(hour or 0) * 60 + int(minute or 0)) * 60 + int(second or 0)) * TICKS
    ticks += int((fraction or "").ljust(7, "0")[:7])
    minutes = None
    if offset:
        sign = -1 if offset[0] == "-" else 1
        minutes = 0 if offset == "Z" else sign * (int(offset[1:3]) * 60 + int(offset[4:6]))
    return days, ticks, minutes


def _clock(ticks: int, digits: int) -> str:
    seconds, rest = divmod(ticks, TICKS)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{rest // 10 ** (7 - digits):0{digits}}" if digits else text


def _day(days: int) -> str:
    return (dt.date(1970, 1, 1) + dt.timedelta(days)).isoformat()


def _rounded(days: int, ticks: int, unit: int) -> tuple[int, int]:
    ticks = (ticks + unit // 2) // unit * unit
    return days + ticks // (86400 * TICKS), ticks % (86400 * TICKS)


def normal(kind: str, value: Any) -> Any:
    """*value* as a column of type *kind* has it. :raises ValueError: it cannot."""
    if value is None:
        return None
    name, size, scale = parse_type(kind)
    if name in ("tinyint", "smallint", "int", "bigint"):
        return int(value)
    if name == "bit":
        return int(bool(int(value)))
    if name in ("decimal", "numeric", "money", "smallmoney"):
        digits = 4 if name in ("money", "smallmoney") else scale
        return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, _EXACT):f}"
    if name == "float":
        return float(value)
    if name == "real":
        return struct.unpack("<f", struct.pack("<f", float(value)))[0]
    if name in ("binary", "varbinary", "image", "timestamp", "rowversion"):
        data = value if isinstance(value, bytes) else str(value).encode()
        return data.ljust(size, b"\0") if name == "binary" else data
    if name in ("date", "time", "datetime", "smalldatetime", "datetime2", "datetimeoffset"):
        return _time(name, size, str(value))
    if name == "uniqueidentifier":
        text = str(value).strip("{}").upper()
        if not re.fullmatch(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", text):
            raise ValueError("no uniqueidentifier")
        return text
    text = repr(value) if isinstance(value, float) else str(value)
    return text.ljust(size) if name in ("char", "nchar") else text


def _time(name: str, size: int, text: str) -> str:
    days, ticks, offset = moment(text)
    if name == "date":
        return _day(days)
    if name == "time":
        return _clock(_rounded(0, ticks, 10 ** (7 - size))[1], size)
    if name == "datetime":  # in 300ths of a second
        units = (ticks * 300 + TICKS // 2) // TICKS
        days, units = days + units // (86400 * 300), units % (86400 * 300)
        return f"{_day(days)} {_clock((units * 1000 + 150) // 300 * (TICKS // 1000), 3)}"
    if name == "smalldatetime":
        days, ticks = _rounded(days, ticks, 60 * TICKS)
        return f"{_day(days)} {_clock(ticks, 0)}"
    days, ticks = _rounded(days, ticks, 10 ** (7 - size))
    made = f"{_day(days)} {_clock(ticks, size)}"
    if name == "datetimeoffset":
        minutes = offset or 0
        made += f" {'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    return made


def converted(kind: str, value: Any, style: int | None = None) -> Any:
    """``CONVERT``."""
    if value is None:
        return None
    name, _, _ = parse_type(kind)
    if name in ("char", "varchar", "nchar", "nvarchar"):
        if isinstance(value, bytes) and style is None and name in _WIDE:
            return value.decode("utf-16le", "surrogatepass").replace(_HALF, HALF)
        if isinstance(value, bytes):
            return f"0x{value.hex().upper()}" if style == 1 else value.hex().upper()
        return repr(value) if isinstance(value, float) else str(value)
    if name in ("varbinary", "binary") and isinstance(value, str) and style == 2:
        return bytes.fromhex(value)
    return normal(kind, value)


def instant(text: str) -> int:
    """Ticks since 1970, UTC."""
    days, ticks, offset = moment(text)
    return days * 86400 * TICKS + ticks - (offset or 0) * 60 * TICKS


def datediff(unit: str, begin: str | None, end: str | None) -> int | None:
    if begin is None or end is None:
        return None
    of = {"microsecond": 10, "day": 86400 * TICKS}[unit.lower()]
    return instant(end) // of - instant(begin) // of


def datepart(unit: str, value: str | None) -> int | None:
    assert unit.lower() == "nanosecond"
    return None if value is None else moment(value)[1] % TICKS * 100


def switchoffset(value: str | None, offset: str) -> str | None:
    if value is None:
        return None
    assert offset == "+00:00"
    ticks = instant(value)
    return f"{_day(ticks // (86400 * TICKS))} {_clock(ticks % (86400 * TICKS), 7)} +00:00"


def guid_rank(text: str) -> bytes:
    """What the order of ``uniqueidentifier`` compares: the last group first, the first one last."""
    raw = bytes.fromhex(text.replace("-", ""))
    stored = raw[3::-1] + raw[5:3:-1] + raw[7:5:-1] + raw[8:]
    return stored[10:16] + stored[8:10] + stored[6:8] + stored[4:6] + stored[0:4]


def text_rank(text: str) -> str:
    """What a collation that takes capitals as small letters compares: blanks at the end do not count."""
    return text.rstrip(" ").casefold()


def rank(kind: str, value: Any) -> Any:
    """What the order of a type compares."""
    name, _, _ = parse_type(kind)
    if name == "uniqueidentifier":
        return guid_rank(value)
    if name in ("decimal", "numeric", "money", "smallmoney"):
        return Decimal(value)
    if name == "datetimeoffset":
        return instant(value)
    if name in ("char", "varchar", "nchar", "nvarchar"):
        return text_rank(value)
    return value
