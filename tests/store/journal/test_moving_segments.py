"""Readers of a segment that others cut and write again at the worst moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headwater.journal.entry import Entry, Rewound
from headwater.journal.errors import SegmentCutError
from headwater.journal.store import Store

Ids = tuple[str, str]


def fill(store: Store, ids: Ids, mark: str, count: int) -> None:
    store.append(*ids, [Entry("x", {"mark": mark}, 1)])
    for _ in range(count - 1):
        store.append(*ids, Entry("x", {"mark": mark}, 1))


def test_a_read_never_mixes_two_histories(store: Store, ids: Ids) -> None:
    """Lines of the same length stand at the same offsets after the cut: only the checksum tells."""
    for _ in range(3):
        store.append(*ids, [Entry("x", {"mark": "a", "pad": "p" * 60_000}, 1) for _ in range(20)])
    reader = store.iter(*ids)
    seen = [next(reader) for _ in range(5)]
    store.truncate(*ids, 0)
    for _ in range(3):
        store.append(*ids, [Entry("x", {"mark": "b", "pad": "p" * 60_000}, 1) for _ in range(20)])
    with pytest.raises(SegmentCutError):
        seen += list(reader)
    assert {entry.fields["mark"] for entry in seen} == {"a"}
    assert {entry.fields["mark"] for entry in store.tail(*ids, 9)} == {"b"}


def test_a_follower_outlives_a_cut_while_it_looks_for_common_ground(
    store: Store, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, ids, "a", 10)
    follower = store.follow(*ids, poll=0.001)
    for _ in range(10):
        next(follower)
    store.truncate(*ids, 4)
    fill(store, ids, "b", 3)
    original, calls = type(store).iter, 0

    def cut_meanwhile(self: Store, *args: Any, **options: Any) -> Iterator[Entry]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise SegmentCutError(ids[1], 7)
        return original(self, *args, **options)

    monkeypatch.setattr(type(store), "iter", cut_meanwhile)
    news = [next(follower) for _ in range(4)]
    assert news[0] == Rewound(4)
    assert [entry.fields["mark"] for entry in news[1:] if isinstance(entry, Entry)] == ["b", "b", "b"]
    follower.close()  # type: ignore[attr-defined]
