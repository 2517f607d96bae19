"""Real kills, real limits: what was sealed is there, what was not is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import headwater.state.engines.compaction
import headwater.state.engines.embedded
import headwater.state.engines.object_store  # noqa: F401  (registers its failpoints)
from headwater import failpoints
from headwater.state import WriteBatch, open_reader, open_writer
from headwater.state.errors import StoreFull, StoreOwned, StoreUnavailable, WriterFenced
from headwater.stream.epoch import Epoch

SOAK = "HEADWATER_SOAK" in os.environ
LOOP = Path(__file__).with_name("crash_loop.py")
PRELUDE = """
import os, sys, time
from headwater.state import WriteBatch, open_reader, open_writer
from headwater.stream.epoch import Epoch
location = sys.argv[1]
def seal(store, number, **cells):
    batch = WriteBatch()
    for key, value in cells.items():
        batch.put(key.encode(), value)
    store.seal(Epoch.from_ms(number), batch)
"""


def location_of(engine: str, tmp_path: Path) -> str:
    return str(tmp_path / "store") if engine == "embedded" else f"slatedb+file://{tmp_path}/store"


def python(script: str, location: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), location],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def content(location: str, epoch: int | None = None) -> tuple[int, dict[bytes, bytes]]:
    with open_reader(location) as store, store.snapshot(epoch) as view:
        return view.epoch.ms, dict(view.scan())


@pytest.mark.parametrize(("engine", "rounds"), [("embedded", 200 if SOAK else 80), ("slatedb", 200 if SOAK else 20)])
def test_kill_9_in_a_write_loop_loses_nothing_sealed_and_shows_nothing_unsealed(
    engine: str, rounds: int, tmp_path: Path
) -> None:
    command = [sys.executable, str(LOOP), location_of(engine, tmp_path), str(rounds), "20261115"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    result = json.loads(done.stdout)
    assert result["violations"] == 0, done.stderr
    assert result["rounds"] == rounds
    assert result["sealed"] > rounds


COMPACT = """
store.close()
from pathlib import Path
from headwater.state.engines.compaction import compact_embedded
compact_embedded(Path(location))
"""
STEPS = {
    # failpoint: (script, what the store holds after the kill, of the epochs 1 and 2)
    "state.embedded.seal_begun": ("seal(store, 2, k=b'2')", {1}),
    "state.embedded.seal_before_commit": ("seal(store, 2, k=b'2')", {1}),
    "state.embedded.seal_after_commit": ("seal(store, 2, k=b'2')", {2}),
    "state.embedded.open_before_commit": ("", {1}),
    "state.embedded.pin_before_commit": ("store.pin('p')", {1}),
    "state.embedded.unpin_before_commit": ("store.pin('p'); store.unpin('p')", {1}),
    "state.embedded.stage_before_commit": ("b = WriteBatch(); b.put(b'k', b'2'); store.stage(b)", {1}),
    "state.embedded.compact_copied": (COMPACT, {1}),
    "state.embedded.compact_replaced": (COMPACT, {1}),
    "state.object_store.seal_values_written": ("seal(store, 2, k=b'2' * 9999)", {1}),
    "state.object_store.seal_before_write": ("seal(store, 2, k=b'2')", {1}),
    "state.object_store.seal_before_flush": ("seal(store, 2, k=b'2')", {1, 2}),
    "state.object_store.seal_after_flush": ("seal(store, 2, k=b'2')", {2}),
    "state.object_store.open_claimed": ("", {1}),
}


def test_every_durable_step_of_the_state_store_has_a_crash_test() -> None:
    assert {name for name in failpoints.registered() if name.startswith("state.")} == set(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_a_durable_step_leaves_the_old_or_the_new_epoch_whole(step: str, tmp_path: Path) -> None:
    location = location_of("embedded" if ".embedded." in step else "slatedb", tmp_path)
    with open_writer(location) as store:
        batch = WriteBatch()
        batch.put(b"k", b"1")
        store.seal(Epoch.from_ms(1), batch)
    script, allowed = STEPS[step]
    process = python(f"store = open_writer(location)\n{script}", location, **{failpoints.VARIABLE: f"{step}=kill"})
    assert process.wait(30) == -signal.SIGKILL
    process.communicate()
    number, found = content(location)
    assert number in allowed
    assert found[b"k"][:1] == str(number).encode()
    with open_writer(location) as store:  # the dead owner is succeeded without a word, and work goes on
        assert [pin.name for pin in store.pins()] == (["p"] if step == "state.embedded.unpin_before_commit" else [])
        batch = WriteBatch()
        batch.put(b"k", b"3")
        store.seal(Epoch.from_ms(3), batch)
    assert content(location) == (3, {b"k": b"3"})


@pytest.mark.parametrize("engine", ["embedded", "slatedb"])
def test_a_writer_in_another_process_is_refused_by_name_then_taken_over(engine: str, tmp_path: Path) -> None:
    location = location_of(engine, tmp_path)
    process = python(
        """
        store = open_writer(location)
        seal(store, 1, k=b"1")
        print("ready", flush=True)
        while not os.path.exists(location.removeprefix("slatedb+file://") + ".go"):
            time.sleep(0.02)
        try:
            seal(store, 2, k=b"stale")
            print("wrote", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
        """,
        location,
    )
    assert first_line(process) == "ready"
    with pytest.raises(StoreOwned) as caught:
        open_writer(location)
    assert caught.value.pid == process.pid
    # a stopped process wakes up after the takeover, as a machine does after a long pause
    os.kill(process.pid, signal.SIGSTOP)
    with open_writer(location, takeover=True) as store:
        Path(location.removeprefix("slatedb+file://") + ".go").touch()
        os.kill(process.pid, signal.SIGCONT)
        assert first_line(process) == "WriterFenced"
        process.communicate(timeout=30)
        batch = WriteBatch()
        batch.put(b"k", b"new")
        store.seal(Epoch.from_ms(2), batch)
    assert content(location) == (2, {b"k": b"new"})


SEALING = """
store = open_writer(location)
seal(store, 1, k=b"1")
print("sealing", flush=True)
seal(store, 2, k=b"2")
"""


def test_while_a_writer_is_inside_a_seal_readers_open_and_writers_are_refused_at_once(tmp_path: Path) -> None:
    location = location_of("embedded", tmp_path)
    process = python(SEALING, location, **{failpoints.VARIABLE: "state.embedded.seal_before_commit=sleep:4@2"})
    assert first_line(process) == "sealing"
    time.sleep(0.3)
    begun = time.monotonic()
    assert content(location) == (1, {b"k": b"1"})
    with pytest.raises(StoreOwned) as caught:
        open_writer(location)
    assert caught.value.pid == process.pid
    assert time.monotonic() - begun < 2.5, "nobody waited for the seal to end"
    process.communicate(timeout=30)
    assert content(location) == (2, {b"k": b"2"})


def test_a_writer_stopped_inside_a_seal_cannot_be_fenced_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = location_of("embedded", tmp_path)
    monkeypatch.setattr("headwater.state.engines.embedded.TAKEOVER_SECONDS", 0.5)
    process = python(SEALING, location, **{failpoints.VARIABLE: "state.embedded.seal_before_commit=sleep:60@2"})
    assert first_line(process) == "sealing"
    time.sleep(0.3)
    with pytest.raises(StoreUnavailable, match=f"pid {process.pid}"):
        open_writer(location, takeover=True)
    process.kill()
    process.communicate()
    time.sleep(0.2)
    with open_writer(location) as store:
        store.seal(Epoch.from_ms(2), WriteBatch())
    assert content(location) == (2, {b"k": b"1"})


def test_an_open_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    location = location_of("embedded", tmp_path)
    failpoints.arm("state.embedded.open_before_commit=raise")
    try:
        with pytest.raises(failpoints.FailpointError):
            open_writer(location)
    finally:
        failpoints.arm("")
    with open_writer(location) as store:
        store.seal(Epoch.from_ms(1), WriteBatch())


def test_a_store_is_its_directory_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_writer("store") as store:
        monkeypatch.chdir("/")
        store.seal(Epoch.from_ms(1), WriteBatch())
        assert store.statistics().committed_epoch == Epoch.from_ms(1)
    with open_writer(tmp_path / "store") as old:
        (tmp_path / "store").rename(tmp_path / "moved")
        with open_writer(tmp_path / "store") as new:
            new.seal(Epoch.from_ms(5), WriteBatch())
            old.seal(Epoch.from_ms(2), WriteBatch())
            assert (old.committed_epoch().ms, new.committed_epoch().ms) == (2, 5)


def test_closing_a_handle_waits_for_the_seal_of_another_thread(tmp_path: Path) -> None:
    with open_writer(location_of("embedded", tmp_path)) as store:
        failpoints.arm("state.embedded.seal_before_commit=sleep:1.5")
        try:
            thread = threading.Thread(target=store.seal, args=(Epoch.from_ms(1), WriteBatch()))
            thread.start()
            time.sleep(0.5)
            store.close()
            thread.join()
        finally:
            failpoints.arm("")
    assert content(location_of("embedded", tmp_path)) == (1, {})


def test_a_second_takeover_fences_the_first_one(tmp_path: Path) -> None:
    location = location_of("embedded", tmp_path)
    with open_writer(location) as first, open_writer(location, takeover=True) as second:
        with open_writer(location, takeover=True) as third:
            for fenced in (first, second):
                with pytest.raises(WriterFenced):
                    fenced.seal(Epoch.from_ms(1), WriteBatch())
            third.seal(Epoch.from_ms(1), WriteBatch())
        with open_reader(location) as reader:
            owner = reader.owner()
    assert owner is not None
    assert owner.generation == 3


def test_a_full_disk_is_a_clear_error_and_the_store_goes_on_when_there_is_room(tmp_path: Path) -> None:
    location = location_of("embedded", tmp_path)
    process = python(
        """
        import resource
        from headwater.state.errors import StoreFull
        store = open_writer(location)
        seal(store, 1, k=b"1")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        for _ in range(3):
            try:
                seal(store, 2, big=b"x" * (4 << 20))
                print("sealed")
            except StoreFull as error:
                print("StoreFull:", error)
            assert store.committed_epoch().ms == 1
        seal(store, 2, k=b"2")
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        seal(store, 3, big=b"x" * (4 << 20))
        print("done")
        """,
        location,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[-1] == "done"
    assert len(lines) == 4
    assert all(line.startswith("StoreFull: ") and "Free some space" in line for line in lines[:3])
    assert content(location) == (3, {b"k": b"2", b"big": b"x" * (4 << 20)})


def test_a_store_at_its_own_limit_refuses_whole_batches(tmp_path: Path) -> None:
    from headwater.state.engines.embedded import open_embedded_writer

    with open_embedded_writer(tmp_path / "store", max_bytes=1 << 20) as store:
        small, large = WriteBatch(), WriteBatch()
        small.put(b"k", b"v")
        large.put(b"a", b"small part")
        large.put(b"b", b"x" * (2 << 20))
        store.seal(Epoch.from_ms(1), small)
        for _ in range(2):
            with pytest.raises(StoreFull, match="max_bytes"):
                store.seal(Epoch.from_ms(2), large)
        with store.snapshot() as view:
            assert dict(view.scan()) == {b"k": b"v"}
    with open_embedded_writer(tmp_path / "store", max_bytes=1 << 24) as store:
        store.seal(Epoch.from_ms(2), large)
        assert store.committed_epoch().ms == 2


def test_a_reader_killed_inside_a_snapshot_does_not_hold_space_for_ever(tmp_path: Path) -> None:
    location = location_of("embedded", tmp_path)
    store = open_writer(location)
    value = os.urandom(20_000)

    def churn(first: int, count: int) -> int:
        for number in range(first, first + count):
            batch = WriteBatch()
            batch.put_many((b"k%02d" % place, value) for place in range(20))
            store.seal(Epoch.from_ms(number), batch)
        return store.statistics().bytes_on_disk

    churn(1, 20)
    process = python("view = open_reader(location).snapshot(); print('open', flush=True); time.sleep(60)", location)
    assert first_line(process) == "open"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(1.1)  # dead readers are looked for once a second
    small = churn(21, 20)
    large = churn(41, 300)
    store.close()
    assert large < small * 1.5


def test_readers_in_other_processes_see_whole_epochs_while_one_writes(tmp_path: Path) -> None:
    location = location_of("embedded", tmp_path)
    store = open_writer(location)
    store.seal(Epoch.from_ms(1), WriteBatch())
    script = """
    reader, last = open_reader(location), 0
    while last < 300:
        epoch = reader.wait_for_epoch(Epoch.from_ms(last) if last else 0, 20)
        with reader.snapshot() as view:
            values = {value for _, value in view.scan()}
            assert view.epoch >= epoch
            assert values <= {str(view.epoch.ms).encode()}, values
            last = view.epoch.ms
    print("saw", last)
    """
    readers = [python(script, location) for _ in range(3)]
    for number in range(2, 301):
        batch = WriteBatch()
        batch.put_many((b"k%03d" % place, str(number).encode()) for place in range(200))
        store.seal(Epoch.from_ms(number), batch)
        time.sleep(0.001)
    for process in readers:
        out, err = process.communicate(timeout=60)
        assert out.strip() == "saw 300", err
    store.close()


def test_pages_of_deleted_epochs_are_used_again(tmp_path: Path) -> None:
    store = open_writer(location_of("embedded", tmp_path))
    chunk = os.urandom(100_000)
    sizes = {}
    for number in range(1, 301):
        batch = WriteBatch()
        batch.put_many((b"%08d/%02d" % (number, place), chunk) for place in range(4))
        batch.delete_prefix(b"%08d/" % (number - 5))
        store.seal(Epoch.from_ms(number), batch)
        sizes[number] = store.statistics().bytes_on_disk
    store.close()
    assert sizes[300] < 2 * sizes[10]
