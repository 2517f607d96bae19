"""Shrinking: the fewest steps of a script that still fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(steps: Sequence[T], failing: Callable[[list[list[T]]], int | None], width: int = 8) -> list[T]:
    """Leave out parts of *steps*, smaller and smaller ones, for as long as what is left fails.

    :param failing: tries scripts, side by side, and gives the place of one that fails; ``None``: none does, or the time
        is over. :param width: how many are tried at once.
    """
    left = list(steps)
    parts = 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        tried = [left[:start] + left[start + size :] for start in range(0, len(left), size)]
        for first in range(0, len(tried), width):
            group = tried[first : first + width]
            if (place := failing(group)) is not None:
                left, parts = group[place], max(parts - 1, 2)
                break
        else:
            if size == 1:
                return left
            parts = min(2 * parts, len(left))
    return left
