"""The contract of the state store, one suite over every engine."""

from __future__ import annotations

import multiprocessing
import uuid
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.state import MAX_KEY_BYTES, StateReader, StateStore, WriteBatch, open_reader, open_writer
from headwater.state.errors import (
    EpochNotHeld,
    EpochNotIncreasing,
    InvalidEpoch,
    InvalidKey,
    InvalidValue,
    PinExists,
    PinNotFound,
    StoreClosed,
    StoreNotFound,
    StoreOwned,
    WriterFenced,
)
from headwater.stream.epoch import Epoch

LARGE = bytes(range(256)) * 400  # beyond what any engine keeps inline


def at(number: int) -> Epoch:
    return Epoch.from_ms(number)


@dataclass
class Engine:
    """A place for one store, and the handles opened on it."""

    kind: str
    location: str

    def __post_init__(self) -> None:
        self._handles: list[StateReader] = []

    def writer(self, *, takeover: bool = False) -> StateStore:
        store = open_writer(self.location, takeover=takeover)
        self._handles.append(store)
        return store

    def reader(self) -> StateReader:
        handle = open_reader(self.location)
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        for handle in reversed(self._handles):
            handle.close()


@pytest.fixture(params=["memory", "embedded", "slatedb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    location = {
        "memory": f"memory://{uuid.uuid4()}",
        "embedded": str(tmp_path / "store"),
        "slatedb": f"slatedb+file://{tmp_path}/store",
    }[request.param]
    made = Engine(request.param, location)
    yield made
    made.close()


@pytest.fixture
def store(engine: Engine) -> StateStore:
    return engine.writer()


def sealed(store: StateStore, number: int, **cells: bytes | None) -> Epoch:
    batch = WriteBatch()
    for key, value in cells.items():
        if value is None:
            batch.delete(key.encode())
        else:
            batch.put(key.encode(), value)
    store.seal(at(number), batch)
    return at(number)


def content(store: StateReader, epoch: int | None = None) -> dict[str, bytes]:
    with store.snapshot(epoch) as view:
        return {key.decode(): value for key, value in view.scan()}


def test_a_new_store_is_empty_and_has_sealed_nothing(store: StateStore) -> None:
    assert store.committed_epoch() == 0
    assert content(store) == {}
    with store.snapshot() as view:
        assert view.epoch == 0
        assert view.get(b"k") is None


def test_a_sealed_batch_is_visible_under_its_epoch(store: StateStore) -> None:
    sealed(store, 7, a=b"1", b=b"")
    assert store.committed_epoch() == at(7)
    with store.snapshot() as view:
        assert (view.epoch, view.get(b"a"), view.get(b"b"), view.get(b"c")) == (at(7), b"1", b"", None)


def test_steps_of_a_batch_apply_in_order(store: StateStore) -> None:
    sealed(store, 1, a=b"old", b=b"old", c=b"old")
    batch = WriteBatch()
    batch.put(b"d", b"gone with the range")
    batch.delete_range(b"b", b"e")
    batch.put(b"c", b"after the range")
    batch.put(b"a", b"1")
    batch.put(b"a", b"2")
    batch.delete(b"x")
    assert len(batch) == 6
    store.seal(at(2), batch)
    assert content(store) == {"a": b"2", "c": b"after the range"}


def test_what_is_staged_is_there_after_the_seal_and_never_at_an_older_pin(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, a=b"1")
    store.pin("old")
    for part in range(3):
        batch = WriteBatch()
        batch.put(b"part%d" % part, LARGE)
        batch.put(b"small%d" % part, b"s")
        store.stage(batch)
    store.stage(WriteBatch())
    nothing = WriteBatch()
    nothing.delete_range(b"x", b"y")
    store.stage(nothing)
    assert store.committed_epoch() == at(1)
    assert content(store, at(1)) in ({"a": b"1"}, content(store))
    sealed(store, 2, b=b"2")
    assert len(content(store)) == 8
    assert content(store, at(1)) == {"a": b"1"}
    store.close()
    again = engine.writer()
    batch = WriteBatch()
    batch.delete_prefix(b"part")
    again.stage(batch)
    again.seal(at(3), WriteBatch())
    assert sorted(content(again)) == ["a", "b", "small0", "small1", "small2"]


def test_a_snapshot_taken_after_a_stage_sees_it_also_while_an_older_one_is_open(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, a=b"1")
    with store.snapshot() as older:
        batch = WriteBatch()
        batch.put(b"staged", b"s")
        store.stage(batch)
        with store.snapshot() as newer:
            assert (newer.get(b"staged"), newer.epoch) == (b"s", at(1))
            again = WriteBatch()
            again.put(b"staged", b"t")
            store.stage(again)
            assert newer.get(b"staged") == b"s"
        assert dict(older.scan()) == {b"a": b"1"}
        sealed(store, 2, b=b"2")
        assert dict(older.scan()) == {b"a": b"1"}
    assert content(store) == {"a": b"1", "b": b"2", "staged": b"t"}


def test_a_fenced_writer_cannot_stage(engine: Engine) -> None:
    old = engine.writer()
    new = engine.writer(takeover=True)
    batch = WriteBatch()
    batch.put(b"k", b"stale")
    with pytest.raises(WriterFenced):
        old.stage(batch)
    new.seal(at(1), WriteBatch())
    assert content(new) == {}


def test_an_empty_batch_still_seals_its_epoch(store: StateStore) -> None:
    store.seal(at(3), WriteBatch())
    assert store.committed_epoch() == at(3)


def test_keys_come_in_unsigned_byte_order_both_ways(store: StateStore) -> None:
    keys = [b"\x00", b"\x00\x00", b"\x00\xff", b"a", b"a\x00", b"aa", b"b", b"\x7f", b"\x80", b"\xff", b"\xff\xff"]
    batch = WriteBatch()
    batch.put_many((key, key) for key in reversed(keys))
    store.seal(at(1), batch)
    with store.snapshot() as view:
        assert [key for key, _ in view.scan()] == sorted(keys)
        assert [key for key, _ in view.scan(reverse=True)] == sorted(keys, reverse=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (None, None, "abcde"),
        (b"b", None, "bcde"),
        (None, b"d", "abc"),
        (b"b", b"d", "bc"),
        (b"b0", b"d0", "cd"),
        (b"x", None, ""),
        (None, b"0", ""),
        (b"d", b"b", ""),
        (b"c", b"c", ""),
        (b"", b"\xff", "abcde"),
    ],
)
def test_a_scan_covers_the_half_open_range(
    engine: Engine, start: bytes | None, end: bytes | None, found: str, reverse: bool
) -> None:
    store = engine.writer()
    sealed(store, 1, **{key: key.encode() for key in "abcde"})
    with store.snapshot() as view:
        keys = [key.decode() for key, _ in view.scan(start, end, reverse=reverse)]
    assert keys == (list(reversed(found)) if reverse else list(found))


def test_a_prefix_scan_ends_with_its_prefix(store: StateStore) -> None:
    batch = WriteBatch()
    for key in (b"a", b"a\x00", b"a\xff", b"a\xff\xff", b"b", b"\xff", b"\xff\xff"):
        batch.put(key, b"")
    store.seal(at(1), batch)
    with store.snapshot() as view:
        assert [key for key, _ in view.scan_prefix(b"a")] == [b"a", b"a\x00", b"a\xff", b"a\xff\xff"]
        assert [key for key, _ in view.scan_prefix(b"\xff", reverse=True)] == [b"\xff\xff", b"\xff"]
        assert len(list(view.scan_prefix(b""))) == 7


def test_delete_prefix_and_open_range_deletes(store: StateStore) -> None:
    batch = WriteBatch()
    batch.put_many([(b"a1", b""), (b"a2", b""), (b"b1", b""), (b"c1", b"")])
    store.seal(at(1), batch)
    batch = WriteBatch()
    batch.delete_prefix(b"a")
    batch.delete_range(b"c")
    store.seal(at(2), batch)
    assert content(store) == {"b1": b""}
    batch = WriteBatch()
    batch.delete_range()
    store.seal(at(3), batch)
    assert content(store) == {}


def test_large_values_come_back_whole_and_are_replaced_and_deleted(store: StateStore) -> None:
    batch = WriteBatch()
    batch.put(b"first", LARGE)
    batch.put(b"second", memoryview(LARGE)[::1])
    batch.put(b"small", b"s")
    store.seal(at(1), batch)
    assert content(store) == {"first": LARGE, "second": LARGE, "small": b"s"}
    sealed(store, 2, first=LARGE[1:], second=None, small=LARGE)
    assert content(store) == {"first": LARGE[1:], "small": LARGE}
    with store.mapped_snapshot() as view:
        assert isinstance(view.get(b"first"), memoryview)
        assert {key: bytes(value) for key, value in view.scan()} == {b"first": LARGE[1:], b"small": LARGE}
        assert [key for key, _ in view.scan(b"a", b"s", reverse=True)] == [b"first"]


def test_a_snapshot_does_not_see_later_seals(store: StateStore) -> None:
    sealed(store, 1, a=b"1", b=b"1")
    with store.snapshot() as view:
        walk = view.scan()
        assert next(walk) == (b"a", b"1")
        sealed(store, 2, a=b"2", b=None, c=b"2")
        assert list(walk) == [(b"b", b"1")]
        assert (view.get(b"a"), view.get(b"c"), view.epoch) == (b"1", None, at(1))
    assert content(store) == {"a": b"2", "c": b"2"}


def test_a_pinned_epoch_stays_readable_whatever_is_sealed_after(store: StateStore) -> None:
    sealed(store, 1, a=b"1", b=b"1", c=b"1")
    pin = store.pin("backfill")
    assert (pin.name, pin.epoch) == ("backfill", at(1))
    sealed(store, 2, a=b"2", b=None, d=b"2")
    sealed(store, 3, a=None, b=b"3", d=b"3")
    batch = WriteBatch()
    batch.delete_range(b"c", None)
    store.seal(at(4), batch)
    assert content(store, at(1)) == {"a": b"1", "b": b"1", "c": b"1"}
    with store.snapshot(at(1)) as view:
        assert [view.get(key) for key in (b"a", b"b", b"c", b"d")] == [b"1", b"1", b"1", None]
        assert [key for key, _ in view.scan(b"a", b"c", reverse=True)] == [b"b", b"a"]
    assert content(store) == {"b": b"3"}


def test_pins_of_several_epochs_do_not_disturb_each_other(store: StateStore) -> None:
    sealed(store, 1, k=b"1")
    store.pin("one")
    sealed(store, 2, k=b"2")
    store.pin("two")
    sealed(store, 3, k=None)
    sealed(store, 4, k=b"4")
    assert [content(store, at(n)).get("k") for n in (1, 2, 4)] == [b"1", b"2", b"4"]
    assert [(pin.name, pin.epoch) for pin in store.pins()] == [("one", at(1)), ("two", at(2))]
    store.unpin("one")
    sealed(store, 5, k=b"5")
    assert content(store, at(2)) == {"k": b"2"}
    with pytest.raises(EpochNotHeld) as caught:
        store.snapshot(at(1))
    assert caught.value.readable == (at(2), at(5))


def test_a_pin_can_share_an_epoch_that_another_pin_holds(store: StateStore) -> None:
    sealed(store, 1, k=b"1")
    store.pin("first")
    sealed(store, 2, k=b"2")
    assert store.pin("second", at(1)).epoch == at(1)
    store.unpin("first")
    sealed(store, 3, k=b"3")
    assert content(store, at(1)) == {"k": b"1"}


def test_pinning_twice_is_the_same_pin_and_another_epoch_is_refused(store: StateStore) -> None:
    sealed(store, 1)
    first = store.pin("p")
    sealed(store, 2)
    assert store.pin("p").epoch == first.epoch
    assert store.pin("p", at(1)).epoch == at(1)
    with pytest.raises(PinExists):
        store.pin("p", at(2))
    with pytest.raises(PinNotFound):
        store.unpin("q")


def test_an_epoch_that_nobody_holds_cannot_be_read_or_pinned(store: StateStore) -> None:
    sealed(store, 5, k=b"5")
    sealed(store, 6, k=b"6")
    for epoch in (at(4), at(5), at(9)):
        with pytest.raises(EpochNotHeld, match="Readable now"):
            store.snapshot(epoch)
        with pytest.raises(EpochNotHeld):
            store.pin("p", epoch)
    assert store.pins() == ()


def test_pins_and_content_survive_a_reopen(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, k=b"1", large=LARGE)
    store.pin("kept")
    sealed(store, 2, k=b"2", large=None)
    store.close()
    again = engine.writer()
    assert again.committed_epoch() == at(2)
    assert content(again) == {"k": b"2"}
    sealed(again, 3, k=b"3")
    assert content(again, at(1)) == {"k": b"1", "large": LARGE}
    assert [pin.name for pin in again.pins()] == ["kept"]


def test_epochs_only_go_forward(store: StateStore) -> None:
    sealed(store, 2, k=b"2")
    for late in (1, 2):
        with pytest.raises(EpochNotIncreasing) as caught:
            sealed(store, late, k=b"late")
        assert caught.value.committed == at(2)
    with pytest.raises(InvalidEpoch):
        store.seal(0, WriteBatch())
    with pytest.raises(InvalidEpoch):
        store.seal("1", WriteBatch())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low 16 bits"):
        store.seal(at(3) + 1, WriteBatch())
    assert content(store) == {"k": b"2"}
    sealed(store, 3, k=b"3")
    assert content(store) == {"k": b"3"}


@pytest.mark.parametrize("key", [b"", b"x" * (MAX_KEY_BYTES + 1)])
def test_a_key_of_the_wrong_size_is_refused_before_anything_is_added(key: bytes) -> None:
    batch = WriteBatch()
    refusals: tuple[Callable[[], None], ...] = (
        lambda: batch.put(key, b""),
        lambda: batch.put_many([(b"good", b""), (key, b"")]),
        lambda: batch.delete(key),
    )
    for refused in refusals:
        with pytest.raises(InvalidKey, match="1 to 480 bytes"):
            refused()
    assert len(batch) == 0
    assert not batch


def test_keys_and_values_of_the_wrong_type_are_refused() -> None:
    batch = WriteBatch()
    with pytest.raises(InvalidKey):
        batch.put("text", b"")  # type: ignore[arg-type]
    with pytest.raises(InvalidKey):
        batch.put_many([(b"k", b""), ("text", b"")])  # type: ignore[list-item]
    with pytest.raises(InvalidValue):
        batch.put(b"k", "text")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue):
        batch.put_many([(b"k", 1)])  # type: ignore[list-item]
    assert not batch


def test_a_batch_owns_its_values(store: StateStore) -> None:
    changing, numbers = bytearray(b"before"), memoryview(array("q", range(5000)))
    batch = WriteBatch()
    batch.put(b"a", changing)
    batch.put_many([(b"b", memoryview(changing)), (b"c", numbers), (b"d", b"plain")])
    changing[:] = b"after!"
    store.seal(at(1), batch)
    assert content(store) == {"a": b"before", "b": b"before", "c": numbers.tobytes(), "d": b"plain"}
    released = memoryview(b"gone")
    released.release()
    with pytest.raises(InvalidValue, match="released"):
        batch.put(b"e", released)


def test_wrong_bounds_keys_and_pin_names_are_our_own_errors(store: StateStore) -> None:
    sealed(store, 1, a=b"1")
    batch = WriteBatch()
    with pytest.raises(InvalidKey):
        batch.delete_range("a", None)  # type: ignore[arg-type]
    with store.snapshot() as view:
        for use in (lambda: view.get("a"), lambda: view.scan("a"), lambda: view.scan(None, 1)):  # type: ignore[arg-type]
            with pytest.raises(InvalidKey):
                use()
        assert view.get(b"") is None
        assert view.get(b"k" * 5000) is None
        assert list(view.scan(None, b"")) == []
    for name in ("", "x" * 101, "new\nline", "lone \ud800", 7):
        with pytest.raises(InvalidKey, match="pin"):
            store.pin(name)  # type: ignore[arg-type]


def test_one_handle_serves_many_threads(store: StateStore) -> None:
    sealed(store, 1, **{f"k{place}": b"1" for place in range(50)})

    def read(_: int) -> bool:
        with store.snapshot() as view:
            return {value for _, value in view.scan()} == {str(view.epoch.ms).encode()}

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(read, place) for place in range(60)]
        for number in range(2, 12):
            sealed(store, number, **{f"k{place}": str(number).encode() for place in range(50)})
        assert all(answer.result() for answer in answers)


def test_a_pin_that_came_back_finds_its_own_epoch(store: StateStore) -> None:
    sealed(store, 1, k=b"1", only1=b"x")
    store.pin("p")
    sealed(store, 1000, k=b"between")
    assert content(store, at(1)) == {"k": b"1", "only1": b"x"}
    store.pin("q")
    sealed(store, 2000, k=b"2000", only1=None)
    store.unpin("q")
    sealed(store, 3000, k=b"3000", only1=b"again")
    assert content(store, at(1)) == {"k": b"1", "only1": b"x"}
    store.unpin("p")
    assert store.pin("p").epoch == at(3000)
    sealed(store, 4000, k=None)
    assert content(store, at(3000)) == {"k": b"3000", "only1": b"again"}


def test_the_longest_key_fits_pinned_or_not(store: StateStore) -> None:
    key = b"k" * MAX_KEY_BYTES
    for number, value in ((1, b"1"), (2, b"2")):
        batch = WriteBatch()
        batch.put(key, value)
        store.seal(at(number), batch)
        if number == 1:
            store.pin("p")
    with store.snapshot(at(1)) as view:
        assert view.get(key) == b"1"


def test_a_closed_handle_says_so(store: StateStore) -> None:
    sealed(store, 1, a=b"1", b=b"2")
    view = store.snapshot()
    walk = view.scan()
    next(walk)
    view.close()
    view.close()
    with pytest.raises(StoreClosed):
        view.get(b"a")
    with pytest.raises(StoreClosed):
        view.scan()
    if not store.location.startswith("memory"):  # memory hands out a finished list
        with pytest.raises(StoreClosed):
            list(walk)
    store.close()
    store.close()
    for use in (store.committed_epoch, store.snapshot, store.pins, lambda: store.seal(at(2), WriteBatch())):
        with pytest.raises(StoreClosed):
            use()


def test_a_second_writer_is_refused_with_the_owners_name(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, k=b"1")
    with pytest.raises(StoreOwned) as caught:
        engine.writer()
    owner = store.owner()
    assert owner is not None
    assert (caught.value.host, caught.value.pid, caught.value.started) == (owner.host, owner.pid, owner.started)
    assert str(owner.pid) in str(caught.value)
    assert owner.host in str(caught.value)
    sealed(store, 2, k=b"2")


def test_after_a_takeover_the_old_writer_writes_nothing(engine: Engine) -> None:
    old = engine.writer()
    sealed(old, 1, k=b"1")
    new = engine.writer(takeover=True)
    assert content(new) == {"k": b"1"}
    for _ in range(2):
        with pytest.raises(WriterFenced):
            sealed(old, 2, k=b"stale", large=LARGE)
    assert content(new) == {"k": b"1"}
    sealed(new, 2, k=b"2")
    assert content(new) == {"k": b"2"}
    first, second = old.owner(), new.owner()
    assert first is not None
    assert first == second
    assert first.generation == 2


def test_a_closed_writer_leaves_the_store_to_the_next(engine: Engine) -> None:
    for number in (1, 2, 3):
        store = engine.writer()
        sealed(store, number, **{f"k{number}": b"v"})
        store.close()
    assert len(content(engine.writer())) == 3


def test_a_reader_follows_the_writer(engine: Engine) -> None:
    with pytest.raises(StoreNotFound):
        engine.reader()
    store = engine.writer()
    sealed(store, 1, k=b"1")
    reader = engine.reader()
    assert reader.wait_for_epoch(0, 5) == at(1)
    assert content(reader) == {"k": b"1"}
    assert reader.wait_for_epoch(at(1), 0.01) is None
    sealed(store, 2, k=b"2", large=LARGE)
    assert reader.wait_for_epoch(at(1), 5) == at(2)
    assert content(reader) == {"k": b"2", "large": LARGE}
    assert not hasattr(reader, "seal")


def test_a_reader_can_pin_and_the_writer_honours_it(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, k=b"1", large=LARGE)
    reader = engine.reader()
    pin = reader.pin("of the reader")
    assert pin.epoch == at(1)
    sealed(store, 2, k=b"2", large=None)
    assert content(reader, at(1)) == {"k": b"1", "large": LARGE}
    assert [found.name for found in store.pins()] == ["of the reader"]
    reader.unpin("of the reader")
    assert store.pins() == ()


def test_a_pin_made_while_no_writer_lives_is_honoured_by_the_next(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, k=b"1")
    store.close()
    reader = engine.reader()
    assert reader.pin("waiting").epoch == at(1)
    store = engine.writer()
    sealed(store, 2, k=b"2")
    assert content(reader, at(1)) == {"k": b"1"}


def test_statistics_name_engine_size_pins_and_owner(engine: Engine) -> None:
    store = engine.writer()
    sealed(store, 1, k=b"1", large=LARGE)
    store.pin("p")
    figures = store.statistics()
    assert figures.engine == engine.kind
    assert figures.location == store.location
    assert figures.committed_epoch == at(1)
    assert figures.keys in (2, None)
    assert figures.bytes_on_disk >= len(LARGE)
    assert [pin.name for pin in figures.pins] == ["p"]
    assert figures.owner == store.owner()


def _use_inherited(store: StateStore, answers: multiprocessing.Queue[str]) -> None:
    try:
        store.committed_epoch()
        answers.put("worked")
    except StoreClosed as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_handle_is_refused_in_a_forked_child(store: StateStore) -> None:
    sealed(store, 1, k=b"1")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_use_inherited, args=(store, answers))
    child.start()
    assert "does not survive a fork" in answers.get(timeout=20)
    child.join(20)
    sealed(store, 2, k=b"2")
    assert content(store) == {"k": b"2"}
