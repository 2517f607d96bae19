"""Transactions that are streamed before their commit, on real files."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.errors import CapacityError
from headwater.sources.errors import SourceBusy, SourceClosed, SourceError, SourceProtocolError, SpillFull
from headwater.sources.postgres.spill import SpillStore


def message(kind: str, subxid: int, text: str = "", lsn: int = 1) -> bytes:
    return b"w" + struct.pack("!QQQ", lsn, lsn, 0) + kind.encode() + subxid.to_bytes(4, "big") + text.encode()


def rows(subxid: int, start: int, count: int, size: int = 40) -> list[bytes]:
    return [message("I", subxid, f"{number:0{size}}") for number in range(start, start + count)]


def replayed(store: SpillStore, xid: int) -> list[bytes]:
    return [one for block in store.replay(xid) for one in block]


@pytest.mark.parametrize("held", [1, 500, 1 << 20], ids=["every block on disk", "some", "all in memory"])
def test_interleaved_transactions_come_back_whole_and_in_order(tmp_path: Path, held: int) -> None:
    seeded = random.Random(5)
    expected: dict[int, list[bytes]] = {700: [], 701: [], 9: []}
    with SpillStore(tmp_path, held_per_transaction=held) as store:
        for number in range(200):
            xid = seeded.choice(list(expected))
            block = rows(xid, number * 100, seeded.randrange(0, 7), seeded.choice((0, 40, 900)))
            store.append(xid, block)
            expected[xid] += block
        assert store.statistics().messages == sum(map(len, expected.values()))
        assert store.statistics().bytes == sum(len(one) for block in expected.values() for one in block)
        for xid, messages in expected.items():
            assert replayed(store, xid) == messages
            assert replayed(store, xid) == messages, "a replay takes nothing away"
            store.drop(xid)
        assert store.statistics().transactions == 0
        assert list(tmp_path.glob("*.spill")) == []


def test_memory_of_all_transactions_is_bounded(tmp_path: Path) -> None:
    with SpillStore(tmp_path, held_per_transaction=1 << 20, held_in_all=10_000) as store:
        for number in range(300):
            store.append(number % 30, rows(1, number, 10))
            statistics = store.statistics()
            assert statistics.bytes_in_memory <= 10_000
        assert statistics.spilled > 1
        assert statistics.bytes_on_disk == sum(path.stat().st_size for path in tmp_path.glob("*.spill"))
        for xid in range(30):
            assert replayed(store, xid) == [one for at in range(10) for one in rows(1, xid + 30 * at, 10)]


def test_a_rolled_back_savepoint_is_left_out(tmp_path: Path) -> None:
    origin = b"w" + bytes(24) + b"O" + (12).to_bytes(4, "big") + bytes(4) + b"origin\0"
    with SpillStore(tmp_path, held_per_transaction=100) as store:
        store.append(10, [origin, *rows(10, 0, 3)])
        store.append(10, [message("R", 11, "t"), *rows(11, 3, 3), *rows(12, 6, 2)])
        store.append(10, [message("M", 11, "watermark"), message("T", 11), message("Y", 11)])
        store.abort(10, 12)
        store.abort(10, 11)
        store.append(10, rows(13, 8, 2))
        assert replayed(store, 10) == [origin, *rows(10, 0, 3), *rows(13, 8, 2)]


def test_a_rolled_back_transaction_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    with SpillStore(tmp_path, held_per_transaction=100) as store:
        for _ in range(3):
            store.append(10, rows(10, 0, 5))
            store.append(20, rows(20, 0, 5))
        store.abort(10, 10)
        store.abort(99, 99)
        store.abort(99, 100)
        with pytest.raises(SourceProtocolError, match="10"):
            replayed(store, 10)
        assert replayed(store, 20) == rows(20, 0, 5) * 3
        assert [path.name for path in tmp_path.glob("*.spill")] == ["20.spill"]


def test_a_transaction_without_changes_of_ours_is_known_and_empty(tmp_path: Path) -> None:
    with SpillStore(tmp_path) as store:
        store.append(10, [])
        assert replayed(store, 10) == []
        assert store.statistics().transactions == 1


def test_files_are_for_their_owner_alone_and_a_crash_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    script = f"""
import os
from pathlib import Path
from headwater.sources.postgres.spill import SpillStore
store = SpillStore(Path({str(directory)!r}), held_per_transaction=1)
store.append(10, [b"w" + bytes(40)])
store.append(10, [b"w" + bytes(40)])
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 9
    (left,) = directory.glob("*.spill")
    assert left.stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0
    with SpillStore(directory) as store:
        assert list(directory.glob("*.spill")) == []
        assert store.statistics().bytes_on_disk == 0


def test_a_directory_has_one_store(tmp_path: Path) -> None:
    with SpillStore(tmp_path, held_per_transaction=1) as store:
        store.append(10, rows(10, 0, 1))
        store.append(10, rows(10, 1, 1))
        with pytest.raises(SourceBusy, match="Another process"):
            SpillStore(tmp_path)
        assert replayed(store, 10) == rows(10, 0, 2)
    SpillStore(tmp_path).close()


def test_a_full_disk_refuses_the_block_and_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    """A real limit on the size of a file; what a caller could take for the beginning of a block is cut off."""
    script = f"""
import resource, sys
from pathlib import Path
from headwater.sources.errors import SpillFull
from headwater.sources.postgres.spill import SpillStore
store = SpillStore(Path({str(tmp_path)!r}), held_per_transaction=1000)
block = [b"w" + bytes(24) + b"I" + bytes(4) + b"secret" * 100 for _ in range(10)]
for _ in range(4):
    store.append(10, block)
before = store.statistics()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (before.bytes_on_disk + 1000, hard))
for _ in range(3):
    try:
        store.append(10, block)
    except SpillFull as error:
        assert "secret" not in str(error), error
        print(error)
    assert store.statistics() == before
    assert (Path({str(tmp_path)!r}) / "10.spill").stat().st_size == before.bytes_on_disk
    assert [one for part in store.replay(10) for one in part] == block * 4
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
store.append(10, block)
assert [one for part in store.replay(10) for one in part] == block * 5
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no room") == 3
    assert done.stdout.count("Free some space") == 3


def test_a_store_at_its_own_limit_refuses_and_goes_on_when_a_transaction_ends(tmp_path: Path) -> None:
    with SpillStore(tmp_path, max_bytes=3000, held_per_transaction=1) as store:
        for _ in range(4):
            store.append(10, rows(10, 0, 10))
        store.append(20, rows(20, 0, 10))
        with pytest.raises(SpillFull, match="3000 bytes") as refused:
            store.append(20, rows(20, 10, 10))
        assert isinstance(refused.value, CapacityError)
        assert refused.value.next_step is not None
        assert replayed(store, 20) == rows(20, 0, 10)
        store.drop(10)
        store.append(20, rows(20, 10, 10))
        assert replayed(store, 20) == rows(20, 0, 20)


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_damage_to_a_file_is_an_error_and_never_other_rows(tmp_path: Path, damage: str) -> None:
    with SpillStore(tmp_path, held_per_transaction=1) as store:
        for number in range(4):
            store.append(10, rows(10, number, 1))
        path = tmp_path / "10.spill"
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[-1] ^= 1
            path.write_bytes(content)
        elif damage == "short":
            path.write_bytes(content[:-1])
        else:
            path.unlink()
        with pytest.raises(SourceError, match=r"not as it was written|cannot be used"):
            replayed(store, 10)


def test_a_restarted_stream_and_a_closed_store_hold_nothing(tmp_path: Path) -> None:
    store = SpillStore(tmp_path, held_per_transaction=1)
    for xid in (10, 20):
        store.append(xid, rows(xid, 0, 3))
        store.append(xid, rows(xid, 3, 3))
    store.clear()
    assert store.statistics().transactions == store.statistics().bytes_on_disk == 0
    store.append(10, rows(10, 0, 1))
    assert replayed(store, 10) == rows(10, 0, 1)
    store.close()
    store.close()
    assert list(tmp_path.glob("*.spill")) == []
    with pytest.raises(SourceClosed):
        store.append(10, [])
