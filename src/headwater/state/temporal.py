"""Dates and times as whole numbers: days and microseconds since 1970, microseconds of a day. Pure."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

_DAY_ZERO = date(1970, 1, 1).toordinal()
_INSTANT_ZERO = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def days(value: date) -> int:
    return value.toordinal() - _DAY_ZERO


def date_of(number: int) -> date:
    return date.fromordinal(number + _DAY_ZERO)


def micros_of_day(value: time) -> int:
    """:raises ValueError: the time has a time zone."""
    if value.tzinfo is not None:
        raise ValueError("time zone")
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


def time_of(micros: int) -> time:
    if not 0 <= micros < 86_400_000_000:
        raise ValueError("time of day")
    return (_INSTANT_ZERO + timedelta(microseconds=micros)).time()


def micros_naive(value: datetime) -> int:
    """:raises ValueError: the timestamp has a time zone."""
    if value.tzinfo is not None:
        raise ValueError("time zone")
    return (value.replace(tzinfo=UTC) - _INSTANT_ZERO) // _MICROSECOND


def micros_aware(value: datetime) -> int:
    """:raises ValueError: the timestamp has no time zone. :raises OverflowError: outside the years 1 to 9999 in UTC."""
    if value.utcoffset() is None:
        raise ValueError("time zone")
    return (value.astimezone(UTC) - _INSTANT_ZERO) // _MICROSECOND


def aware(micros: int) -> datetime:
    return _INSTANT_ZERO + timedelta(microseconds=micros)


def naive(micros: int) -> datetime:
    return aware(micros).replace(tzinfo=None)
