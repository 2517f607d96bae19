"""Older epochs, kept as an undo log: what a key held at a pin, before a newer epoch changed it.

The main table always holds the newest epoch under plain keys, so the common read costs nothing extra. Only while
a pin exists does a seal first record, for each key that it is about to change, the value from before, labelled with
the newest pin (or the highest label there is, when that pin is gone):

    undo[label | key] = 0x00            the key was absent
    undo[label | key] = 0x01 | value    the key held value

The first record of a label wins: it is the state at the pin. A read at a pinned epoch ``p`` takes, for each key, the
record with the smallest label from ``p`` on, else the main table; so it costs as many looks as there are pins,
however many epochs were sealed since. Labels below the oldest pin serve nobody and are purged. Pure: engines pass in
their tables as :class:`Cells`.
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


def _place(label: int, key: bytes = b"") -> bytes:
    return label.to_bytes(8, "big") + key


def label_for(undo: Cells, newest_pin: int) -> int:
    """The label of what a seal is about to change."""
    for place, _ in undo.items(None, None, True):
        return max(newest_pin, int.from_bytes(place[:8], "big"))
    return newest_pin


def record(main: Cells, undo: Cells, label: int, keys: Iterable[bytes]) -> None:
    """Keep what *keys* hold now, unless the label has it already."""
    prefix = _place(label)
    for key in keys:
        place = prefix + key
        if undo.get(place) is None:
            old = main.get(key)
            undo.put(place, _ABSENT if old is None else _PRESENT + old)


def purge(undo: Cells, oldest_pin: int | None) -> None:
    """Drop the records that no pin can need any more."""
    undo.delete_range(None, None if oldest_pin is None else _place(oldest_pin))


def labels_from(undo: Cells, epoch: int) -> list[int]:
    """The labels that a read at the pinned *epoch* has to look at, in order."""
    found: list[int] = []
    while True:
        start = _place(found[-1] + 1 if found else epoch)
        for key, _ in undo.items(start, None, False):
            found.append(int.from_bytes(key[:8], "big"))
            break
        else:
            return found


def get_at(main: Cells, undo: Cells, labels: Sequence[int], key: bytes) -> Any:
    """The value of *key* at the pin that has to look at *labels*."""
    for label in labels:
        old = undo.get(_place(label, key))
        if old is not None:
            return old[1:] if old[:1] == _PRESENT else None
    return main.get(key)


def scan_at(
    main: Cells, undo: Cells, labels: Sequence[int], start: bytes | None, end: bytes | None, reverse: bool
) -> Iterator[tuple[bytes, Any]]:
    """Keys and values of ``[start, end)`` at the pin that has to look at *labels*."""

    def older(label: int) -> Iterator[tuple[bytes, Any]]:
        low, high = _place(label, start or b""), _place(label + 1) if end is None else _place(label, end)
        for place, old in undo.items(low, high, reverse):
            yield place[8:], old[1:] if old[:1] == _PRESENT else None

    # heapq.merge is stable: of equal keys the smallest label's record comes first, the main table's last
    sources = [*map(older, labels), main.items(start, end, reverse)]
    last: bytes | None = None
    for key, value in heapq.merge(*sources, key=_first, reverse=reverse):
        if key != last:
            last = key
            if value is not None:
                yield key, value
