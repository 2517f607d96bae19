"""The embedded engine on real files: what it refuses, and how it is kept private."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from headwater.state import WriteBatch, open_reader, open_writer
from headwater.state.engines.compaction import compact_embedded
from headwater.state.engines.filesystem import NETWORK_FILE_SYSTEMS, file_system_of
from headwater.state.errors import InvalidLocation, StoreBusy, StoreCorrupt, StoreNotFound
from headwater.stream.epoch import Epoch


def sealed(path: Path, epochs: int = 3, value: bytes = b"v" * 2000) -> Path:
    with open_writer(path) as store:
        for number in range(1, epochs + 1):
            batch = WriteBatch()
            batch.put_many((b"%04d/%02d" % (number, place), value) for place in range(20))
            store.seal(Epoch.from_ms(store.committed_epoch().ms + 1), batch)
    return path


def test_files_are_private(tmp_path: Path) -> None:
    path = sealed(tmp_path / "deep" / "store")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_places_that_are_not_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for open_it in (open_writer, open_reader):
        with pytest.raises(InvalidLocation, match="not a directory"):
            open_it(tmp_path / "file")
    with pytest.raises(InvalidLocation, match="not a directory"):
        open_writer(tmp_path / "file" / "below")
    with pytest.raises(StoreNotFound):
        open_reader(tmp_path / "nowhere")
    for open_it in (open_writer, open_reader):
        with pytest.raises(InvalidLocation):
            open_it(tmp_path / ("long" * 100))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFound):
        open_reader(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://h/0",
        "slatedb+gs://b/p",
        "slatedb+file:relative",
        "file://host/path",
        "memory://",
        "slatedb+s3://[x",
    ],
)
def test_urls_of_no_engine_are_refused_without_repeating_them(url: str) -> None:
    for open_it in (open_writer, open_reader):
        with pytest.raises(InvalidLocation) as caught:
            open_it(url)
        assert "h/0" not in str(caught.value)


def test_file_urls_and_plain_paths_are_the_same_place(tmp_path: Path) -> None:
    sealed(tmp_path / "a store")
    with open_reader(f"file://{tmp_path}/a%20store") as reader:
        assert reader.committed_epoch() == Epoch.from_ms(3)


MOUNTS = """22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/share rw - nfs4 server:/export rw
31 30 0:41 / /mnt/share/local\\040disk rw - xfs /dev/sdb rw
"""


def test_network_file_systems_are_recognised_by_the_deepest_mount() -> None:
    assert file_system_of(Path("/home/x"), MOUNTS) == "ext4"
    assert file_system_of(Path("/mnt/share/x"), MOUNTS) in NETWORK_FILE_SYSTEMS
    assert file_system_of(Path("/mnt/shared"), MOUNTS) == "ext4"
    assert file_system_of(Path("/mnt/share/local disk/x"), MOUNTS) == "xfs"


def test_a_store_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.state.engines.filesystem.file_system_of", lambda path: "nfs4")
    with pytest.raises(InvalidLocation, match=r"nfs4.*local disk.*slatedb\+s3"):
        open_writer(tmp_path / "store")


def test_foreign_damaged_and_newer_files_are_corrupt_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "data.mdb").write_bytes(b"not a database " * 1000)
    newer = sealed(tmp_path / "newer")
    environment = lmdb.open(str(newer), max_dbs=3)
    with environment.begin(write=True) as txn:
        txn.put(b"format", b"99", db=environment.open_db(b"meta", txn=txn))
    environment.close()
    for path, words in ((foreign, "damaged"), (newer, "format 99")):
        before = (path / "data.mdb").read_bytes()
        for open_it in (open_reader, open_writer):
            with pytest.raises(StoreCorrupt, match=words):
                open_it(path)
        assert (path / "data.mdb").read_bytes() == before


def test_a_file_cut_short_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    path = sealed(tmp_path / "store", epochs=10)
    data = path / "data.mdb"
    whole = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(whole // 2)
    for open_it in ("open_reader", "open_writer"):
        script = f"import sys; from headwater.state import {open_it}; {open_it}(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "cut short" in done.stderr


def test_free_pages_missing_at_the_end_are_no_damage(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        batch = WriteBatch()
        batch.put(b"large", b"x" * 90_000)
        batch.delete(b"large")
        batch.put(b"k", b"v")
        store.seal(Epoch.from_ms(1), batch)
    data = tmp_path / "store" / "data.mdb"
    with data.open("r+b") as file:  # as after a crash before the file was lengthened
        file.truncate(data.stat().st_size - 40_960)
    with open_reader(tmp_path / "store") as reader, reader.snapshot() as view:
        assert dict(view.scan()) == {b"k": b"v"}


def test_two_handles_of_one_process_share_the_store(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store, open_reader(tmp_path / "store") as reader:
        batch = WriteBatch()
        batch.put(b"k", b"v")
        store.seal(Epoch.from_ms(1), batch)
        with reader.snapshot() as view:
            store.close()
            assert view.get(b"k") == b"v"
        assert reader.committed_epoch() == Epoch.from_ms(1)


def test_compaction_gives_space_back_and_changes_nothing_else(tmp_path: Path) -> None:
    path = sealed(tmp_path / "store", epochs=30)
    with open_writer(path) as store:
        store.pin("kept")
        batch = WriteBatch()
        batch.delete_range(b"0002")
        store.seal(Epoch.from_ms(100), batch)
        store.unpin("kept")
        store.seal(Epoch.from_ms(101), WriteBatch())
        with pytest.raises(StoreBusy):
            compact_embedded(path)
        with store.snapshot() as view:
            before = list(view.scan())
    saved = compact_embedded(path)
    assert saved.before > 3 * saved.after
    assert (path / "data.mdb").stat().st_size == saved.after
    with open_writer(path) as store:
        assert store.committed_epoch() == Epoch.from_ms(101)
        with store.snapshot() as view:
            assert list(view.scan()) == before
        store.seal(Epoch.from_ms(102), WriteBatch())


def test_compaction_is_refused_while_another_process_reads(tmp_path: Path) -> None:
    path = sealed(tmp_path / "store")
    script = (
        "import sys; from headwater.state import open_reader; reader = open_reader(sys.argv[1]); "
        "print('open', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    with pytest.raises(StoreBusy, match="another process"):
        compact_embedded(path)
    child.communicate()
    assert compact_embedded(path).after > 0
