"""The object-store engine among real processes: forks, namespaces, limits, rights, writers and readers at once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.state import WriteBatch, open_reader, open_writer
from headwater.stream.epoch import Epoch

PRELUDE = """
import os, sys, time
import headwater.state.engines.object_store
from headwater.state import WriteBatch, open_reader, open_writer
from headwater.stream.epoch import Epoch
location = sys.argv[1]
def seal(store, number, **cells):
    batch = WriteBatch()
    for key, value in cells.items():
        batch.put(key.encode(), value)
    store.seal(Epoch.from_ms(number), batch)
def tell(use):
    try:
        print("done", use(), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


def python(script: str, location: str, *before: str) -> list[str]:
    command = [*before, sys.executable, "-c", PRELUDE + textwrap.dedent(script), location]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def location(tmp_path: Path) -> str:
    return f"slatedb+file://{tmp_path}/store"


def test_a_forked_child_is_told_that_it_cannot_use_the_engine_and_harms_nobody(location: str) -> None:
    lines = python(
        """
        store = open_writer(location)
        seal(store, 1, k=b"1" * 9999)
        view = store.snapshot()
        for use in (
            lambda: open_reader(location),
            lambda: open_writer(location),
            lambda: open_writer(location, takeover=True),
            lambda: store.pins(),
            lambda: view.get(b"k"),
            lambda: view.close(),
            lambda: store.close(),
        ):
            pid = os.fork()
            if pid == 0:
                import signal
                signal.alarm(20)
                tell(use)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        seal(store, 2, k=b"2")
        print(store.owner().generation, len(view.get(b"k")))
        """,
        location,
    )
    assert [line.split()[0] for line in lines] == ["StoreClosed"] * 5 + ["done"] * 2 + ["1"]
    assert all("fork" in line for line in lines[:5])
    assert lines[-1] == "1 9999"


def _can_unshare() -> bool:
    command = ["unshare", "--fork", "--pid", "--mount-proc", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _can_unshare(), reason="needs the right to make a pid namespace")
def test_a_writer_in_another_pid_namespace_sees_that_the_owner_lives(location: str) -> None:
    with open_writer(location) as store:
        lines = python("tell(lambda: open_writer(location))", location, "unshare", "--fork", "--pid", "--mount-proc")
        assert [line.split()[0] for line in lines] == ["StoreOwned"]
        store.seal(Epoch.from_ms(1), WriteBatch())


def test_no_room_for_the_values_leaves_the_handle_good(location: str) -> None:
    lines = python(
        """
        import resource
        store = open_writer(location)
        seal(store, 1, k=b"1")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        for _ in range(2):
            tell(lambda: seal(store, 2, big=b"x" * (4 << 20)))
        tell(lambda: seal(store, 2, k=b"2"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        tell(lambda: seal(store, 3, big=b"x" * (4 << 20)))
        print(len(os.listdir(location.removeprefix("slatedb+file://") + "/values")))
        """,
        location,
    )
    assert [line.split()[0] for line in lines] == ["StoreFull", "StoreFull", "done", "done", "1"]
    assert "Free some space" in lines[0]
    with open_reader(location) as reader, reader.snapshot() as view:
        assert (view.get(b"k"), len(view.get(b"big") or b"")) == (b"2", 4 << 20)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headwater-rights-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_reader_without_the_right_to_write_is_told_so_at_once(open_folder: Path) -> None:
    location = f"slatedb+file://{open_folder}/store"
    with open_writer(location) as store:
        store.seal(Epoch.from_ms(1), WriteBatch())
    for path in [open_folder / "store", *(open_folder / "store").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    lines = python(
        """
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        begun = time.monotonic()
        tell(lambda: open_reader(location))
        print(time.monotonic() - begun < 10)
        """,
        location,
    )
    assert lines[0].startswith("InvalidLocation")
    assert "Grant" in lines[0]
    assert lines[1] == "True"


def test_pins_of_readers_hold_their_epoch_while_the_writer_seals_and_restarts(location: str) -> None:
    with open_writer(location) as store:
        made = WriteBatch()
        made.put_many((b"k%03d" % place, b"0" * 5000) for place in range(20))
        store.seal(Epoch.from_ms(1), made)
    script = """
    from headwater.state.errors import StateError
    reader, wrong, held = open_reader(location), 0, 0
    for number in range(6):
        name = f"{os.getpid()}-{number % 2}"
        try:
            pin = reader.pin(name)
        except StateError as error:
            assert type(error).__name__ == "StoreUnavailable", error
            continue
        time.sleep(0.2)
        with reader.snapshot(pin.epoch) as view:
            wrong += {value[:8] for _, value in view.scan()} != {b"%08d" % pin.epoch.ms} and pin.epoch.ms > 1
            held += 1
        reader.unpin(name)
    print(wrong, held > 3)
    """
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), location]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    number = 1
    while any(process.poll() is None for process in readers):
        with open_writer(location, takeover=True) as store:
            for _ in range(40):
                number += 1
                made = WriteBatch()
                made.put_many((b"k%03d" % place, b"%08d" % number + b"." * (5000 * (place % 2))) for place in range(20))
                store.seal(Epoch.from_ms(number), made)
    for process in readers:
        out, err = process.communicate()
        assert out.split() == ["0", "True"], err
    with open_writer(location) as store:
        assert store.pins() == ()
        assert list(Path(location.removeprefix("slatedb+file://"), "pins").iterdir()) == []
