"""The tasks of a batch: how many read a table, and which units share one. Pure.

A task is worth its while from 20,000 rows or 8 MiB on. A table with more is cut, for one task per slot at most; small
tables share a task.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

from headwater.backfill.cdc.executor import HandedOut
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part
from headwater.backfill.units import LogUnit

_ROWS: Final = 20_000
_BYTES: Final = 8 << 20
_LEAST_COST: Final = 0.1
"""Of a unit, in tasks: staging one row costs a tenth of staging 20,000 (Delta: 1.1 and 8 to 12 ms of CPU)."""
_TASKS_PER_SLOT: Final = 4
_SHARES: Final = (4, 2, 1)
"""What tasks that run side by side read, one after the other: with the small ones last, they end together."""

Slots = Callable[[], int]
"""How many tasks run at a time, now. It can wait for Spark: it is called only where one task is not enough."""

T = TypeVar("T")


def tasks_of(rows: int, size: int, slots: Slots) -> int:
    """How many tasks read this many rows and bytes of one table."""
    wanted = math.ceil(max(rows / _ROWS, size / _BYTES))
    return min(wanted, slots()) if wanted > 1 else 1


def cut_parts(parts: Sequence[Part], slots: Slots) -> Iterator[Part]:
    """*parts* of an upstream table, cut where they are large, or of unknown size, and have more than one vnode."""
    for part in parts:
        vnodes = part.end_vnode - part.first_vnode
        pieces = min(tasks_of(part.rows, 0, slots) if part.rows else slots(), vnodes)
        cuts = [part.first_vnode + vnodes * piece // pieces for piece in range(pieces + 1)]
        for first, end in pairwise(cuts):
            yield replace(part, first_vnode=first, end_vnode=end, rows=part.rows // pieces)


def cost(unit: Any) -> float:
    """What it takes to read and stage *unit*, in tasks. A backfill of unknown size counts as one."""
    if isinstance(unit, LogUnit):
        return max(unit.rows / _ROWS, unit.size / _BYTES, _LEAST_COST)
    return max(unit.rows / _ROWS, _LEAST_COST) if unit.rows else 1.0


def packed(claims: Sequence[T], costs: Sequence[float], slots: Slots) -> list[list[T]]:
    """*claims*, by tasks of about the same cost: the most expensive one first, each where there is least so far."""
    count = min(len(claims), math.ceil(sum(costs)))
    if count > 1:
        count = min(count, _TASKS_PER_SLOT * slots())
    tasks: list[tuple[float, int, list[T]]] = [(0.0, number, []) for number in range(count)]
    for position in sorted(range(len(claims)), key=lambda position: costs[position], reverse=True):
        load, number, task = tasks[0]
        task.append(claims[position])
        heapq.heapreplace(tasks, (load + costs[position], number, task))
    return [task for _, _, task in sorted(tasks, key=lambda task: (-task[0], task[1]))]


def groups(parts: Sequence[HandedOut], parallelism: int) -> list[list[HandedOut]]:
    """Neighbours together, for *parallelism* tasks at a time: first large groups, then ever smaller ones."""
    total = sum(max(part.rows, 1) for part in parts)
    ends = accumulate(share * total / (sum(_SHARES) * parallelism) for share in _SHARES for _ in range(parallelism))
    neighbours: list[list[HandedOut]] = []
    passed, end = 0, 0.0
    for part in parts:
        if not neighbours or passed >= end:
            neighbours.append([])
            end = next(later for later in ends if later > passed)
        neighbours[-1].append(part)
        passed += max(part.rows, 1)
    return neighbours
