"""The object-store engine where it differs from the others: value objects, garbage, claims, pins by request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater import failpoints
from headwater.errors import TransientError
from headwater.state import WriteBatch, open_reader, open_writer
from headwater.state.engines import large_values, lease, object_pins, object_snapshot, object_store
from headwater.state.engines.large_values import flat
from headwater.state.engines.object_pins import Ack, PinBoard, Request, key_of
from headwater.state.engines.object_reader import ObjectReader, open_object_reader
from headwater.state.engines.object_store import ObjectStoreStore, open_object_writer
from headwater.state.engines.slate import Place, map_errors, obstore, run
from headwater.state.errors import (
    EpochNotHeld,
    InvalidLocation,
    InvalidValue,
    PinExists,
    StoreClosed,
    StoreFull,
    StoreNotFound,
    StoreOwned,
    StoreUnavailable,
    WriterFenced,
)
from headwater.stream.epoch import Epoch
from headwater.system import process

LARGE = b"L" * 10_000
at = Epoch.from_ms


class Shop:
    """One store and the handles on it, with its time made short."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"
        self._handles: list[ObjectReader] = []

    def writer(self, *, takeover: bool = False, keep: float = 3600.0) -> ObjectStoreStore:
        store = open_object_writer(self.url, takeover=takeover, garbage_seconds=keep)
        self._handles.append(store)
        return store

    def reader(self) -> ObjectReader:
        self._handles.append(open_object_reader(self.url))
        return self._handles[-1]

    def values(self) -> list[str]:
        folder = self.folder / "values"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def close(self) -> None:
        for handle in reversed(self._handles):
            handle.close()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(object_store, "_HOUSEKEEPING_SECONDS", 0.05)
    made = Shop(tmp_path / "store")
    yield made
    failpoints.arm("")
    made.close()


def batch(**cells: bytes | None) -> WriteBatch:
    made = WriteBatch()
    for key, value in cells.items():
        if value is None:
            made.delete(key.encode())
        else:
            made.put(key.encode(), value)
    return made


def seal(store: ObjectStoreStore, number: int, **cells: bytes | None) -> None:
    store.seal(at(number), batch(**cells))


def read(store: ObjectReader, key: bytes, epoch: int | None = None) -> Any:
    with store.snapshot(epoch) as view:
        return view.get(key)


def eventually(check: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def stop_housekeeping(store: ObjectStoreStore) -> None:
    store._stopping.set()
    for thread in store._threads:
        thread.join()


# -- value objects and garbage ---------------------------------------------------------------------------------


def test_a_value_object_goes_when_its_last_pointer_goes_whatever_replaces_it(shop: Shop) -> None:
    store = shop.writer(keep=0)
    seal(store, 1, a=LARGE, b=LARGE, c=LARGE, d=LARGE)
    seal(store, 2, a=b"small", b=LARGE[1:], c=None)
    assert len(shop.values()) == 2
    made = WriteBatch()
    made.delete_range(b"d", None)
    store.seal(at(3), made)
    assert eventually(lambda: len(shop.values()) == 1)
    assert read(store, b"b") == LARGE[1:]
    seal(store, 4, b=b"small")
    assert eventually(lambda: shop.values() == [])


def test_pointers_are_known_again_after_a_reopen(shop: Shop) -> None:
    store = shop.writer()
    seal(store, 1, a=LARGE, b=LARGE)
    store.close()
    store = shop.writer(keep=0)
    seal(store, 2, a=b"small")
    time.sleep(0.3)
    assert len(shop.values()) == 1
    seal(store, 3, b=b"small")
    assert eventually(lambda: shop.values() == [])


def test_an_object_whose_batch_was_never_written_is_collected_by_the_next_writer(shop: Shop) -> None:
    store = shop.writer()
    seal(store, 1, a=LARGE)
    store._place.create("values/0000000001-00000000000000000009-77", LARGE)
    store._place.create("values/of somebody else", LARGE)
    store.close()
    again = shop.writer(keep=0)
    assert eventually(lambda: shop.values() == ["0000000001-00000000000000065536-1", "of somebody else"])
    assert read(again, b"a") == LARGE


def test_an_open_snapshot_keeps_reading_what_was_replaced(shop: Shop) -> None:
    store = shop.writer(keep=60)
    seal(store, 1, a=LARGE)
    with shop.reader().snapshot() as view, store.snapshot() as own:
        seal(store, 2, a=b"small")
        time.sleep(0.3)
        assert view.get(b"a") == own.get(b"a") == LARGE


def test_a_store_that_ended_by_itself_is_closed_all_the_same(shop: Shop) -> None:
    for store in (shop.writer(), shop.reader()):
        run(store._follower.shutdown())
        store.close()
        assert store.closed


def test_a_writer_that_was_taken_over_deletes_nothing(shop: Shop) -> None:
    old = shop.writer(keep=0)
    stop_housekeeping(old)
    seal(old, 1, a=LARGE)
    seal(old, 2, a=b"small")
    shop.writer(takeover=True)
    with pytest.raises(WriterFenced):
        old._garbage.collect((), (), old.confirm, old._drop)
    assert len(shop.values()) == 1
    assert not hasattr(old, "vacuum")


def test_a_staged_delete_leaves_a_pinned_value_alone(shop: Shop) -> None:
    store = shop.writer(keep=0)
    seal(store, 1, a=LARGE)
    store.pin("p")
    store.stage(batch(a=None))
    time.sleep(0.3)
    seal(store, 2, b=b"2")
    assert read(store, b"a", at(1)) == LARGE
    store.unpin("p")
    assert eventually(lambda: shop.values() == [])


def test_a_snapshot_at_a_pin_reads_on_for_a_while_after_the_pin_is_released(shop: Shop) -> None:
    store = shop.writer(keep=0.5)
    seal(store, 1, a=LARGE)
    store.pin("p")
    seal(store, 2, a=b"small")
    time.sleep(0.6)  # old enough to go, but for the pin
    with shop.reader().snapshot(at(1)) as view:
        store.unpin("p")
        time.sleep(0.3)
        assert view.get(b"a") == LARGE
    assert eventually(lambda: shop.values() == [] and store._checkpoints() == [])


def test_a_checkpoint_whose_pin_was_never_answered_is_dropped_by_the_next_writer(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.writer()
    seal(store, 1, a=b"1")
    store.pin("kept")
    seal(store, 2, a=b"2")
    with monkeypatch.context() as patch:
        patch.setattr(PinBoard, "_answer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.pin("lost")
    assert [pin.name for pin in store.pins()] == ["kept"]
    assert len(store._checkpoints()) == 2
    store.close()
    again = shop.writer(keep=0)
    assert eventually(lambda: len(again._checkpoints()) == 1)
    assert read(again, b"a", at(1)) == b"1"


def test_a_scan_reads_a_bounded_part_of_large_values_at_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.writer()
    seal(store, 1, **{f"k{place:02}": LARGE for place in range(20)})
    monkeypatch.setattr(large_values, "GROUP_BYTES", 35_000)
    sizes: list[int] = []

    def reading(place: Place, cells: Any) -> list[bytes]:
        found = large_values.read_values(place, cells)
        sizes.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(object_snapshot, "read_values", reading)
    with store.snapshot() as view:
        assert len(list(view.scan())) == 20
        assert [key for key, _ in view.scan(reverse=True)][:2] == [b"k19", b"k18"]
    assert max(sizes) <= 35_000
    assert sum(sizes) == 2 * 20 * len(LARGE)


def test_values_are_counted_in_bytes_not_in_items() -> None:
    assert len(flat(memoryview(array("q", range(10))))) == 80
    assert bytes(flat(memoryview(b"abcdef")[::2])) == b"ace"
    assert flat(memoryview(array("q"))) == b""
    released = memoryview(b"x")
    released.release()
    with pytest.raises(InvalidValue, match="released"):
        flat(released)


# -- seals that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [object_store.SEAL_BEFORE_FLUSH, object_store.SEAL_AFTER_FLUSH])
def test_a_seal_interrupted_after_its_write_leaves_a_handle_that_only_closes(
    shop: Shop, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")

    def interrupt(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seal(store, 2, a=LARGE)
    uses = (store.snapshot, lambda: store.pin("p"), lambda: seal(store, 2, b=b"2"), lambda: store.stage(batch()))
    for use in uses:
        with pytest.raises(StoreUnavailable, match="unknown"):
            use()
    store.close()
    again = shop.writer()
    has_flushed = step == object_store.SEAL_AFTER_FLUSH
    assert (again.committed_epoch(), read(again, b"a")) in [(at(2), LARGE), *([] if has_flushed else [(at(1), None)])]


@pytest.mark.parametrize("step", [object_store.SEAL_VALUES_WRITTEN, object_store.SEAL_BEFORE_WRITE])
def test_a_seal_that_fails_before_its_write_can_be_tried_again(shop: Shop, step: str) -> None:
    store = shop.writer()
    failpoints.arm(f"{step}=raise")
    with pytest.raises(failpoints.FailpointError):
        seal(store, 1, k=LARGE)
    failpoints.arm("")
    assert shop.values() == []
    assert read(store, b"k") is None
    seal(store, 1, k=LARGE)
    assert read(store, b"k") == LARGE


def test_a_full_object_store_is_no_room_and_the_same_batch_fits_later(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.writer()
    full = obstore.exceptions.GenericError("Unable to copy data to file: No space left on device (os error 28)")

    def refuse(*_: Any, **__: Any) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", refuse)
        with pytest.raises(StoreFull):
            seal(store, 1, k=LARGE)
    seal(store, 1, k=LARGE)
    assert read(store, b"k") == LARGE


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Disk quota exceeded (os error 122)", StoreFull),
        ("File too large (os error 27)", StoreFull),
        ("Unable to open file: Permission denied (os error 13)", InvalidLocation),
        ("Read-only file system (os error 30)", InvalidLocation),
        ("connection reset (os error 104)", StoreUnavailable),
    ],
)
def test_errors_of_the_object_store_say_what_to_do(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, map_errors("here"):
        raise obstore.exceptions.GenericError(text)
    assert isinstance(caught.value, TransientError) == (kind is StoreUnavailable)
    with pytest.raises(InvalidLocation, match="permission"), map_errors("here"):
        raise obstore.exceptions.PermissionDeniedError("403")


def test_empty_ranges_are_empty(shop: Shop) -> None:
    store = shop.writer()
    made = batch(a=b"1")
    made.delete_range(None, b"")
    store.seal(at(1), made)
    with store.snapshot() as view:
        assert list(view.scan(None, b"")) == list(view.scan(b"", b"", reverse=True)) == []
        assert view.get(b"a") == b"1"


# -- claims ----------------------------------------------------------------------------------------------------


def test_a_claim_is_judged_by_the_kernel_only_where_it_is_the_same_kernel_and_namespace(shop: Shop) -> None:
    mine = shop.writer()._claim
    now = mine.beat
    assert mine.alive(now + 10_000)
    assert not mine.ended()
    assert not replace(mine, ticks=mine.ticks + 1).alive(now)
    assert replace(mine, ticks=mine.ticks + 1).ended()
    for elsewhere in (
        replace(mine, namespace=mine.namespace + 1, pid=1 << 22),
        replace(mine, boot="other", pid=1 << 22),
    ):
        assert elsewhere.alive(now + lease.LEASE - 1)
        assert not elsewhere.alive(now + lease.LEASE + 1)
        assert not elsewhere.ended()
    closed = replace(mine, closed=True)
    assert closed.ended()
    assert not closed.alive(now)


def test_a_step_of_the_clock_does_not_kill_the_owner(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.writer()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    with pytest.raises(StoreOwned):
        shop.writer()
    seal(store, 1, k=b"1")


def test_a_process_that_ended_but_was_not_waited_for_is_dead(shop: Shop) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim = replace(shop.writer()._claim, pid=child.pid, ticks=process.start_ticks(child.pid))
    assert claim.alive(claim.beat)
    child.kill()
    assert eventually(lambda: not claim.alive(claim.beat))
    child.communicate()
    assert claim.ended()


def test_a_claim_of_an_earlier_version_is_read_and_judged_by_its_heartbeat() -> None:
    stored = (
        b'{"generation": 3, "host": "h", "pid": 1, "started": "2026-11-15T10:00:00+00:00", '
        b'"boot": "b", "beat": 100.0, "closed": false}'
    )
    claim = lease.Claim.from_bytes(stored)
    assert (claim.generation, claim.ticks) == (3, 0)
    assert (claim.alive(110.0), claim.alive(131.0), claim.ended()) == (True, False, False)
    later = json.dumps(json.loads(claim.to_bytes()) | {"colour": "red"}).encode()
    assert lease.Claim.from_bytes(later) == claim


def test_a_claim_that_is_succeeded_while_it_is_looked_up_is_not_nobody(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shop.writer()
    reading = Place.read
    taken: list[bool] = []

    def read_late(self: Place, name: str) -> bytes | None:
        if name.startswith("owner/") and not taken:
            taken.append(True)
            shop.writer(takeover=True)
        return reading(self, name)

    monkeypatch.setattr(Place, "read", read_late)
    with pytest.raises(StoreOwned):
        shop.writer()
    owner = first.owner()
    assert owner is not None
    assert owner.generation == 2


def test_an_open_that_fails_leaves_the_store_free(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    failpoints.arm(f"{object_store.OPEN_CLAIMED}=raise")
    with pytest.raises(failpoints.FailpointError):
        shop.writer()
    failpoints.arm("")
    with monkeypatch.context() as patch:
        patch.setattr(PinBoard, "adopt", lambda *_: (_ for _ in ()).throw(StoreUnavailable("no answer")))
        with pytest.raises(StoreUnavailable):
            shop.writer()
    seal(shop.writer(), 1, k=b"1")


def test_a_close_that_fails_leaves_the_store_free(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.writer()
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "shut_down", lambda *_: (_ for _ in ()).throw(StoreUnavailable("no answer")))
        with pytest.raises(StoreUnavailable):
            store.close()
    claim = lease.current_claim(store._place)
    assert claim is not None
    assert claim.closed
    shop.writer()


def test_the_heart_beats_while_a_seal_goes_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    store = shop.writer()
    with store._seal_lock:
        assert eventually(
            lambda: (now := lease.current_claim(store._place)) is not None and now.beat > store._claim.beat
        )


# -- pins ------------------------------------------------------------------------------------------------------


def test_a_name_released_and_pinned_again_is_another_pin(shop: Shop) -> None:
    store, reader = shop.writer(), None
    seal(store, 1, k=b"1")
    reader = shop.reader()
    assert reader.pin("x").epoch == at(1)
    seal(store, 2, k=b"2")
    with store._seal_lock:  # no housekeeping meanwhile: the old answer is still there
        reader.unpin("x")
        asked = reader._pin_board._ask(key_of("x"), "x", None)
        assert asked is not None
        assert reader._pin_board._ack(asked) is None
    assert reader.pin("x").epoch == at(2)
    reader.unpin("x")
    assert reader.pin("x", at(2)).epoch == at(2)
    seal(store, 3, k=b"3")
    assert read(reader, b"k", at(2)) == b"2"


def test_the_second_who_asks_for_a_pin_waits_for_the_answer_too(shop: Shop) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")
    readers, found = [shop.reader(), shop.reader()], []
    with store._seal_lock:  # a seal is under way
        threads = [threading.Thread(target=lambda r=reader: found.append(r.pin("x"))) for reader in readers]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        assert found == []
        seal(store, 2, k=b"2")
    for thread in threads:
        thread.join()
    assert [pin.epoch for pin in found] == [at(2), at(2)]
    assert found[0] == found[1]
    assert read(readers[1], b"k", at(2)) == b"2"


def test_a_request_that_loses_the_race_for_its_name_is_the_winners_pin(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")
    store.pin("x")
    seal(store, 2, k=b"2")
    asked, calls = PinBoard._asked, []

    def blind_at_first(self: PinBoard, key: str) -> Request | None:
        calls.append(key)
        return None if len(calls) == 1 else asked(self, key)

    reader = shop.reader()
    monkeypatch.setattr(PinBoard, "_asked", blind_at_first)
    assert reader.pin("x").epoch == at(1)
    with pytest.raises(PinExists):
        reader.pin("x", at(2))


def test_a_pin_asked_for_while_the_writer_ends_is_of_the_epoch_that_stays(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")
    reader, asking = shop.reader(), PinBoard._ask

    def ask_late(self: PinBoard, key: str, name: str, epoch: int | None) -> Request | None:
        stop_housekeeping(store)
        seal(store, 2, k=b"2")
        store.close()
        return asking(self, key, name, epoch)

    monkeypatch.setattr(PinBoard, "_ask", ask_late)
    pin = reader.pin("x")
    assert pin.epoch == at(2)
    monkeypatch.undo()
    again = shop.writer()
    seal(again, 3, k=b"3")
    assert read(reader, b"k", pin.epoch) == b"2"


def test_a_pin_is_not_given_while_a_silent_writer_may_still_live(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")
    stop_housekeeping(store)
    store._place.write(store._claim.name, replace(store._claim, boot="of another machine", beat=0.0).to_bytes())
    monkeypatch.setattr(object_pins, "ANSWER_SECONDS", 0.3)
    reader = shop.reader()
    with pytest.raises(StoreUnavailable, match="did not answer a pin"):
        reader.pin("x")
    assert reader.pins() == ()


def test_without_a_writer_an_older_pin_can_be_shared_and_the_newest_pinned(shop: Shop) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")
    store.pin("first")
    seal(store, 2, k=b"2")
    store.close()
    reader = shop.reader()
    assert reader.pin("second", at(1)).epoch == at(1)
    assert reader.pin("third", at(2)).epoch == at(2)
    with pytest.raises(EpochNotHeld):
        reader.pin("fourth", at(3))
    reader.unpin("first")
    store = shop.writer(keep=0)
    seal(store, 3, k=b"3")
    time.sleep(0.2)
    assert [read(reader, b"k", at(number)) for number in (1, 2)] == [b"1", b"2"]
    assert [pin.name for pin in reader.pins()] == ["second", "third"]


def test_a_refused_request_is_no_pin_and_its_name_is_free(shop: Shop) -> None:
    store = shop.writer()
    seal(store, 1, k=b"1")
    board = shop.reader()._pin_board
    asked = board._ask(key_of("x"), "x", at(7))
    assert asked is not None
    assert eventually(lambda: board._ack(asked) == Ack(None, ""))
    assert store.pins() == ()
    assert store.pin("x").epoch == at(1)


def test_a_writer_that_was_taken_over_answers_no_pin(shop: Shop) -> None:
    old = shop.writer()
    stop_housekeeping(old)
    seal(old, 1, k=b"1")
    old.pin("of both")  # nothing is left in memory that SlateDB would have to write
    new = shop.writer(takeover=True)
    stop_housekeeping(new)
    seal(new, 2, k=b"2")
    new.pin("y")
    board = PinBoard(new._place)
    board._ask(key_of("z"), "z", None)
    with pytest.raises(WriterFenced):  # not even by the checkpoint that is there
        board.adopt(at(1), old)
    new.unpin("of both")
    before = new._checkpoints()
    with pytest.raises(WriterFenced):
        board.adopt(at(1), old)
    assert new._checkpoints() == before
    board.adopt(at(2), new)
    assert [(pin.name, pin.epoch) for pin in new.pins()] == [("y", at(2)), ("z", at(2))]
    with pytest.raises(WriterFenced):
        old.pin("x")


@pytest.mark.parametrize("name", ["../x", "x.json", "a@b", "%2F", "=", "ü" * 100, "\N{GRINNING FACE}" * 100, "~ ."])
def test_any_printable_name_names_a_pin(shop: Shop, name: str) -> None:
    store = shop.writer()
    assert store.pin(name).name == name
    assert [pin.name for pin in store.pins()] == [name]
    assert {path.suffix for path in (shop.folder / "pins").iterdir()} == {".json"}
    store.unpin(name)
    assert store.pins() == ()


def test_a_store_of_the_first_layout_is_read_and_its_leftovers_are_found(shop: Shop) -> None:
    """Counts of pointers instead of the pointers; pins and answers without a nonce; leftovers nobody knows of."""
    store = shop.writer()
    seal(store, 1, a=LARGE, b=LARGE, over=b"small")
    stop_housekeeping(store)
    database, place, first = store._follower, store._place, shop.values()[0]
    for key in (b"m/indexed", b"m/large/a", b"m/large/b"):
        run(database.delete(key))
    run(database.put(b"m/objects/values/" + first.encode(), (2).to_bytes(8, "big")))
    place.create("values/0000000001-00000000000000065536-9", LARGE)
    fields = {"host": "h", "pid": 1, "created": "2026-11-15T10:00:00+00:00", "epoch": None}
    place.create("pins/old%20one.json", json.dumps(fields).encode())
    place.create("acks/old%20one.json", json.dumps({"epoch": int(at(1)), "checkpoint": store.checkpoint()}).encode())
    store.close()
    again = shop.writer(keep=0)
    assert [(pin.name, pin.epoch) for pin in again.pins()] == [("old one", at(1))]
    seal(again, 2, a=b"small", b=b"small")
    time.sleep(0.2)
    assert read(again, b"a", at(1)) == LARGE
    again.unpin("old one")
    assert eventually(lambda: shop.values() == [] and again._checkpoints() == [])


# -- places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/passwd/x", "/proc/nope", "/tmp/" + "x" * 300, "/tmp/a%00b"])
def test_a_place_that_cannot_be_a_directory_is_refused_in_our_words(path: str) -> None:
    with pytest.raises(InvalidLocation):
        open_writer(f"slatedb+file://{path}")
    with pytest.raises((InvalidLocation, StoreNotFound)):
        open_reader(f"slatedb+file://{path}")


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hunter2@bucket/p?endpoint=http://127.0.0.1:1",
        "s3://bucket/p?endpoint=http://user:hunter2@127.0.0.1:1",
        "s3://bucket/p?endpoint=hunter2",
        "s3://bucket/p?endpoint=http://[hunter2",
        "s3://bucket/p?endpoint=ftp://hunter2",
    ],
)
def test_credentials_and_nonsense_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    for create in (True, False):
        with pytest.raises(InvalidLocation) as caught:
            Place.parse(url, create=create)
        assert "hunter2" not in str(caught.value)


def test_a_snapshot_of_the_newest_epoch_ends_before_its_values_may_go(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert object_snapshot.SNAPSHOT_SECONDS < object_store.GARBAGE_SECONDS
    monkeypatch.setattr(object_store, "SNAPSHOT_SECONDS", -1.0)
    store = shop.writer()
    with store.snapshot() as view, pytest.raises(StoreClosed, match="older than"):
        view.get(b"k")
