"""What a table has: rows of the source and of its mirror, brought to values that can be compared one by one."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table. :ivar kinds: by column, one of :data:`KINDS`; ``list:`` and a kind for lists."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: tuple[Row, ...]


def _whole(value: Any) -> Any:
    return int(value)


def _decimal(value: Any) -> Any:
    number = Decimal(str(value))
    return "NaN" if number.is_nan() else number.normalize() + 0


def _double(value: Any) -> Any:
    return repr(float(value))


def _real(value: Any) -> Any:
    return repr(struct.unpack("f", struct.pack("f", float(value)))[0])


def _bytes(value: Any) -> Any:
    return bytes(value)


def _bits(value: Any) -> Any:
    return int.from_bytes(value, "big") if isinstance(value, bytes | bytearray | memoryview) else int(value)


def _date(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.date().isoformat()
    return value.isoformat() if isinstance(value, date) else date.fromisoformat(str(value)).isoformat()


def _time(value: Any) -> Any:
    """As microseconds of the day."""
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if isinstance(value, int):
        return value
    moment = value if isinstance(value, time) else time.fromisoformat(str(value))
    return ((moment.hour * 60 + moment.minute) * 60 + moment.second) * 1_000_000 + moment.microsecond


def _moment(value: Any) -> Any:
    found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return (found if found.tzinfo is None else found.astimezone(UTC).replace(tzinfo=None)).isoformat()


def _json(value: Any) -> Any:
    return json.dumps(json.loads(value, parse_float=Decimal), sort_keys=True, default=str)


KINDS: dict[str, Callable[[Any], Any]] = {
    "int": _whole,
    "decimal": _decimal,
    "double": _double,
    "real": _real,
    "bool": bool,
    "bytes": _bytes,
    "bits": _bits,
    "date": _date,
    "time": _time,
    "moment": _moment,
    "json": _json,
    "text": str,
}


def plain(kind: str, value: Any) -> Any:
    """*value* in the form in which both sides are compared."""
    if value is None:
        return None
    try:
        if kind.startswith("list:"):
            return tuple(plain(kind.removeprefix("list:"), one) for one in value)
        return KINDS[kind](value)
    except (ValueError, TypeError, ArithmeticError, struct.error) as error:
        return ("unreadable", type(error).__name__, repr(value)[:80])


def difference(source: Rows, mirror: Rows) -> str | None:
    """How the mirror differs from the source; ``None``: not at all. A column that it lacks is null there.

    Columns that only the mirror has are left out: dropped ones stay in it.
    """
    places = [mirror.names.index(name) if name in mirror.names else None for name in source.names]
    here = Counter(_plain(source.kinds, row) for row in source.rows)
    there = Counter(
        _plain(source.kinds, [None if place is None else row[place] for place in places]) for row in mirror.rows
    )
    if here == there:
        return None
    missing, extra = list((here - there).elements()), list((there - here).elements())
    absent = [name for name, place in zip(source.names, places, strict=True) if place is None]
    parts = [f"{len(source.rows)} rows, {len(mirror.rows)} in the mirror"]
    parts += [f"the mirror has no column {', '.join(absent)}"] if absent else []
    keys = {row[0]: row for row in extra}
    pairs = [(row, keys[row[0]]) for row in missing if row[0] in keys]
    if pairs:
        columns = Counter(
            name for row, other in pairs for name, one, two in zip(source.names, row, other, strict=True) if one != two
        )
        parts.append("columns that differ: " + ", ".join(f"{name} in {count}" for name, count in columns.items()))
        row, other = pairs[0]
        name, one, two = next(each for each in zip(source.names, row, other, strict=True) if each[1] != each[2])
        parts.append(f"for example {name} of key {row[0]}: {one!r:.60} in the source, {two!r:.60} in the mirror")
    both = {row[0] for row, _ in pairs}
    lost = [row[0] for row in missing if row[0] not in both]
    lone = [row[0] for row in extra if row[0] not in both]
    parts += [f"{len(lost)} missing, for example key {lost[0]}"] if lost else []
    parts += [f"{len(lone)} only in the mirror, for example key {lone[0]}"] if lone else []
    return "; ".join(parts)


def _plain(kinds: Sequence[str], row: Sequence[Any]) -> Row:
    return tuple(plain(kind, value) for kind, value in zip(kinds, row, strict=True))
