"""Older epochs, kept as an undo log: what a key held before a newer epoch changed it.

The main table always holds the newest epoch under plain keys, so the common read costs nothing extra. Only while
a pin exists does a seal of epoch ``e`` first record, for each key that it is about to change, the value from before:

    undo[e | key] = 0x00            the key was absent
    undo[e | key] = 0x01 | value    the key held value

A read at a pinned epoch ``p`` takes, for each key, the undo record with the smallest epoch above ``p``, else the main
table. Records at or below the oldest pin serve nobody and are purged. Pure: engines pass in their tables as
:class:`Cells`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Protocol

_ABSENT = b"\x00"
_PRESENT = b"\x01"
_first = itemgetter(0)


class Cells(Protocol):
    """One ordered map inside a transaction, as an engine shows it to this module.

    Values are bytes, or memoryviews inside a mapped snapshot.
    """

    def get(self, key: bytes) -> Any: ...

    def put(self, key: bytes, value: bytes) -> None: ...

    def items(self, start: bytes | None, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, Any]]: ...

    def delete_range(self, start: bytes | None, end: bytes | None) -> None: ...


def _place(epoch: int, key: bytes = b"") -> bytes:
    return epoch.to_bytes(8, "big") + key


def record(main: Cells, undo: Cells, epoch: int, keys: Iterable[bytes]) -> None:
    """Keep what *keys* hold now; the first record of an epoch wins, it is the state before that epoch."""
    prefix = _place(epoch)
    for key in keys:
        place = prefix + key
        if undo.get(place) is None:
            old = main.get(key)
            undo.put(place, _ABSENT if old is None else _PRESENT + old)


def purge(undo: Cells, oldest_pin: int | None) -> None:
    """Drop the records that no pin can need any more."""
    undo.delete_range(None, None if oldest_pin is None else _place(oldest_pin + 1))


def epochs_after(undo: Cells, epoch: int) -> list[int]:
    """The epochs newer than *epoch* that have undo records, oldest first."""
    found: list[int] = []
    while True:
        start = _place((found[-1] if found else epoch) + 1)
        for key, _ in undo.items(start, None, False):
            found.append(int.from_bytes(key[:8], "big"))
            break
        else:
            return found


def get_at(main: Cells, undo: Cells, epochs: Sequence[int], key: bytes) -> Any:
    """The value of *key* before the first of *epochs* changed it."""
    for epoch in epochs:
        old = undo.get(_place(epoch, key))
        if old is not None:
            return old[1:] if old[:1] == _PRESENT else None
    return main.get(key)


def scan_at(
    main: Cells, undo: Cells, epochs: Sequence[int], start: bytes | None, end: bytes | None, reverse: bool
) -> Iterator[tuple[bytes, Any]]:
    """Keys and values of ``[start, end)`` as they were before the first of *epochs*."""

    def older(epoch: int) -> Iterator[tuple[bytes, Any]]:
        low, high = _place(epoch, start or b""), _place(epoch + 1) if end is None else _place(epoch, end)
        for place, old in undo.items(low, high, reverse):
            yield place[8:], old[1:] if old[:1] == _PRESENT else None

    # heapq.merge is stable: of equal keys the oldest epoch's record comes first, the main table's last
    sources = [*map(older, epochs), main.items(start, end, reverse)]
    last: bytes | None = None
    for key, value in heapq.merge(*sources, key=_first, reverse=reverse):
        if key != last:
            last = key
            if value is not None:
                yield key, value
