"""Ticks: what becomes of the seventh digit of a second. Pure."""

from __future__ import annotations

from enum import Enum


class Ticks(Enum):
    """SQL Server counts 100 ns in ``time(7)``, ``datetime2(7)`` and ``datetimeoffset(7)``; Spark counts microseconds.

    ``REFUSE``: microseconds, and a value whose seventh digit is not 0 is a special value. ``TRUNCATE``: microseconds,
    the digit is left out. ``NS``: Arrow nanoseconds, which Spark cannot read, from 1677 to 2262.
    """

    REFUSE = "refuse"
    TRUNCATE = "truncate"
    NS = "ns"
