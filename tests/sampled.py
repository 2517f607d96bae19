"""Cases that are alike: a share of them by default, all of them in a soak."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

SOAK: Final = "HEADWATER_SOAK" in os.environ

T = TypeVar("T")


def share(cases: Sequence[T], number: int, of: int) -> list[T]:
    """Share *number* of *of*, that tests which are alike divide among them; in a soak each has all of the cases."""
    return list(cases) if SOAK else list(cases)[number % of :: of]


def hits(count: int, place: int) -> list[int]:
    """Which of *count* times a step is to fail: the first and the last; by default one of them in turn, by *place*."""
    return sorted({1, count}) if SOAK else [count if place % 2 else 1]
