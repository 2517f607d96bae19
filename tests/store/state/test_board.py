"""The contract of the board, one suite over every engine; and what files do on a full disk and after a kill."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.s3 import s3_server

from headwater.errors import CapacityError, TransientError
from headwater.state import board as module
from headwater.state import open_writer
from headwater.state.board import Board, FileBoard, open_board

pytestmark = pytest.mark.store


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as url:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield url


@pytest.fixture(params=["memory", "embedded", "slatedb+file", "slatedb+s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return f"memory://{uuid.uuid4()}"
        case "embedded":
            return str(tmp_path / "store")
        case "slatedb+file":
            return f"slatedb+file://{tmp_path}/store"
    return f"slatedb+s3://lake/{uuid.uuid4()}?endpoint={request.getfixturevalue('bucket')}&region=us-east-1"


@pytest.fixture
def board(location: str) -> Board:
    return open_board(location)


def data(board: Board, name: str) -> bytes | None:
    found = board.read(name)
    return None if found is None else found.data


def test_a_board_is_empty_before_the_first_write_and_makes_nothing(board: Board, tmp_path: Path) -> None:
    assert (board.read("status"), board.list("inbox")) == (None, {})
    board.remove("inbox/1")
    assert list(tmp_path.iterdir()) == []


def test_the_newest_write_is_read_by_every_handle(board: Board, location: str) -> None:
    for text in (b"one", b"", b"longer than before", b"2"):
        tag = board.write("status", text)
        found = open_board(location).read("status")
        assert found is not None
        assert (found.data, found.tag) == (text, tag)


def test_a_tag_that_is_known_is_not_read_again(board: Board) -> None:
    tag = board.write("status", b"one")
    found = board.read("status", unless=tag)
    assert found is not None
    assert (found.tag, found.data) == (tag, None)
    board.write("status", b"two")
    again = board.read("status", unless=tag)
    assert again is not None
    assert again.data == b"two"


def test_a_write_with_a_tag_replaces_that_record_only(board: Board) -> None:
    assert board.write("lease", b"none", if_tag="1") is None
    first = board.write("lease", b"one")
    second = board.write("lease", b"two", if_tag=first)
    assert second not in (None, first)
    assert board.write("lease", b"three", if_tag=first) is None
    assert data(board, "lease") == b"two"
    board.remove("lease")
    assert board.write("lease", b"four", if_tag=second) is None
    assert board.read("lease") is None


def test_a_record_is_created_once(board: Board, location: str) -> None:
    assert board.create("inbox/1", b"first")
    assert not open_board(location).create("inbox/1", b"second")
    assert data(board, "inbox/1") == b"first"
    board.remove("inbox/1")
    assert board.create("inbox/1", b"third")


def test_one_of_many_who_create_at_the_same_time_has_done_it(board: Board) -> None:
    done: list[int] = []
    threads = [
        threading.Thread(target=lambda me=me: done.append(me) if board.create("inbox/1", b"%d" % me) else None)
        for me in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [data(board, "inbox/1")] == [b"%d" % me for me in done]


def test_a_folder_lists_its_records_with_their_tags(board: Board, location: str) -> None:
    with open_writer(location):  # its own files are not on the board
        board.write("status", b"well")
        board.create("inbox/1", b"one")
        board.create("inbox/2", b"two")
        found = board.list("inbox")
        assert sorted(found) == ["inbox/1", "inbox/2"]
        for name, tag in found.items():
            record = board.read(name)
            assert record is not None
            assert record.tag == tag
        board.remove("inbox/1")
        assert list(board.list("inbox")) == ["inbox/2"]


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> FileBoard:
    return FileBoard(tmp_path, tmp_path / "board")


def test_a_record_is_overwritten_where_there_is_no_room_for_another(
    files: FileBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = files.write("status", b"before")

    def full(*_: object, **__: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_draft", full)
    size = (tmp_path / "board/status").stat().st_size
    assert files.write("status", b"on a full disk") != tag
    assert data(files, "status") == b"on a full disk"
    assert (tmp_path / "board/status").stat().st_size == size
    with pytest.raises(CapacityError, match="There is no room"):
        files.create("inbox/1", b"")
    with pytest.raises(CapacityError):
        files.write("new", b"")


def test_half_a_record_is_never_read(files: FileBoard, tmp_path: Path) -> None:
    path = tmp_path / "board/status"
    files.write("status", b"whole")
    text = path.read_bytes()
    for length in (0, 3, text.index(b"\n") + 2):
        path.write_bytes(text[:length])
        assert files.read("status") is None
    path.write_bytes(text.replace(b"whole", b"whale"))
    assert files.read("status") is None
    files.write("status", b"again")
    assert data(files, "status") == b"again"


def test_tags_differ_within_one_tick_of_the_clock(files: FileBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr("headwater.state.board.time.time_ns", lambda: now)
    assert len({files.write("status", b"same") for _ in range(20)}) == 20


def test_a_writer_that_is_frozen_is_waited_for_a_while(
    files: FileBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("status", b"one")
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.05)
    with files._alone():
        assert data(files, "status") == b"one"
        with pytest.raises(TransientError, match="holds the lock"):
            FileBoard(tmp_path, tmp_path / "board").write("status", b"two")
    assert files.write("status", b"two")


def test_files_of_a_board_are_private(files: FileBoard, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write("status", b"")
        files.create("inbox/1", b"")
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "board").rglob("*")}
    assert found == {".lock": 0o600, "status": 0o600, "inbox": 0o700, "1": 0o600}
