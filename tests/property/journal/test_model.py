"""Random sequences of calls against a list, on every store, with reopening and torn tails in between (scenario gg)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.store.journal.backends import NAMES, Backend

from headwater.journal.damage import verify
from headwater.journal.entry import EMPTY, Entry, Head, new_id
from headwater.journal.errors import BoundaryNotFoundError, HeadConflictError, InvalidEntryError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.builds(
    Entry,
    kind=st.text(min_size=1, max_size=12),
    fields=st.dictionaries(st.text(max_size=8).map(lambda name: f"f{name}"), JSON, max_size=4),
    ts=st.integers(0, 2**62),
)


class JournalMachine(RuleBasedStateMachine):
    """The model: a list of (entry, key, last of its batch?), and the heads that the store gave for it."""

    backend_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="journal-model-"))
        self.backend = Backend(self.backend_name, self.root)
        self.ids = new_id(), new_id()
        self.model: list[tuple[Entry, str | None, bool]] = []
        self.heads: list[Head] = [EMPTY]

    def teardown(self) -> None:
        self.backend.close()
        shutil.rmtree(self.root)

    @initialize(entries=st.lists(ENTRIES, max_size=3))
    def create(self, entries: list[Entry]) -> None:
        self.backend.store.create_segment(*self.ids, entries)
        self.model = [(entry, None, True) for entry in entries]
        self.heads += [entry.head for entry in self.backend.store.read_all(*self.ids)]

    @rule(entry=ENTRIES)
    def append(self, entry: Entry) -> None:
        self.heads.append(self.backend.store.append(*self.ids, entry))
        self.model.append((entry, None, True))

    @rule(entry=ENTRIES, key=st.sampled_from(["k1", "k2", "k3"]))
    def append_with_key(self, entry: Entry, key: str) -> None:
        head = self.backend.store.append(*self.ids, entry, idempotency_key=key)
        known = [place for place, (_, used, _) in enumerate(self.model, start=1) if used == key]
        if known:
            assert head == self.heads[known[0]]
        else:
            self.heads.append(head)
            self.model.append((entry, key, True))

    @rule(entries=st.lists(ENTRIES, min_size=2, max_size=4))
    def append_batch(self, entries: list[Entry]) -> None:
        before = len(self.model)
        self.backend.store.append(*self.ids, entries)
        self.model += [(entry, None, place == len(entries)) for place, entry in enumerate(entries, start=1)]
        self.heads += [entry.head for entry in self.backend.store.iter(*self.ids, from_seq=before + 1)]

    @rule(entry=ENTRIES, back=st.integers(0, 3))
    def compare_and_swap(self, entry: Entry, back: int) -> None:
        expected = self.heads[max(0, len(self.heads) - 1 - back)]
        if expected == self.heads[-1]:
            self.heads.append(self.backend.store.append(*self.ids, entry, expected_head=expected))
            self.model.append((entry, None, True))
        else:
            with pytest.raises(HeadConflictError) as caught:
                self.backend.store.append(*self.ids, entry, expected_head=expected)
            assert caught.value.current == self.heads[-1]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.model) + 1))
        if n > len(self.model):
            with pytest.raises(BoundaryNotFoundError):
                self.backend.store.truncate(*self.ids, n)
        elif n and not self.model[n - 1][2]:
            with pytest.raises(InvalidEntryError):
                self.backend.store.truncate(*self.ids, n)
        else:
            assert self.backend.store.truncate(*self.ids, n).head == self.heads[n]
            del self.model[n:], self.heads[n + 1 :]

    @rule()
    def reopen(self) -> None:
        self.backend.reopen()

    @rule(junk=st.binary(min_size=1, max_size=30).filter(lambda junk: b"\n" not in junk))
    def tear(self, junk: bytes) -> None:
        self.backend.put_bytes(*self.ids, self.backend.bytes_of(*self.ids) + junk)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read_part(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(1, len(self.model)))
        limit = data.draw(st.integers(0, len(self.model)))
        forward = list(self.backend.store.iter(*self.ids, from_seq=start, limit=limit))
        assert [e.seq for e in forward] == list(range(start, len(self.model) + 1))[:limit]
        newest = self.backend.store.tail(*self.ids, limit)
        assert [e.seq for e in newest] == list(range(1, len(self.model) + 1))[len(self.model) - limit :]

    @invariant()
    def the_store_equals_the_list(self) -> None:
        if not self.backend.store.exists(*self.ids):
            return
        read = self.backend.store.read_all(*self.ids)
        assert [_plain(entry) for entry in read] == [_plain(entry) for entry, _, _ in self.model]
        assert [entry.key for entry in read] == [key for _, key, _ in self.model]
        assert [entry.head for entry in read] == self.heads[1:]
        assert self.backend.store.head(*self.ids) == self.heads[-1]
        assert self.backend.store.read_entry_count(*self.ids) == len(self.model)
        assert [e.seq for e in self.backend.store.tail(*self.ids, 3)] == [e.seq for e in read[-3:]]
        assert verify(self.backend.store, *self.ids).ok


def _plain(entry: Entry) -> tuple[str, str, int | None]:
    """Compared by text: 1, 1.0 and True are equal in Python and not in JSON."""
    return entry.kind, repr(dict(entry.fields)), entry.ts


@pytest.mark.parametrize("name", NAMES)
def test_a_store_behaves_like_a_list(name: str) -> None:
    machine: Any = type("Machine", (JournalMachine,), {"backend_name": name})
    case = machine.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    case().runTest()
