"""The object-store engine over HTTP, against moto's S3 server: a mock, because no S3 server can be installed here.

What it shows: our URLs, put-if-absent for owners and values, SlateDB's own fencing, all through a real socket and from
several processes. What it cannot show: S3's latencies, throttling and partial failures.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.s3 import s3_server
from tests.spark.driven_writer import LOG, DrivenWriter

from headwater.log_store import LogView
from headwater.spark import stream_writer
from headwater.state import WriteBatch, open_reader, open_writer
from headwater.state.engines.object_store import open_object_writer
from headwater.state.errors import (
    EpochNotHeld,
    InvalidLocation,
    StoreNotFound,
    StoreOwned,
    StoreUnavailable,
    WriterFenced,
)
from headwater.stream.epoch import Epoch

LARGE = os.urandom(200_000)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def location(endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    return f"slatedb+s3://lake/{request.node.name}?endpoint={endpoint}&region=us-east-1"


def batch(**cells: bytes) -> WriteBatch:
    made = WriteBatch()
    for key, value in cells.items():
        made.put(key.encode(), value)
    return made


def test_seal_read_pin_and_take_over_on_an_s3_mock_server(location: str) -> None:
    with pytest.raises(StoreNotFound):
        open_reader(location)
    with open_writer(location) as store:
        store.seal(Epoch.from_ms(1), batch(k=b"1", large=LARGE))
        with pytest.raises(StoreOwned):
            open_writer(location)
        with open_reader(location) as reader:
            assert reader.pin("p").epoch == Epoch.from_ms(1)
            store.seal(Epoch.from_ms(2), batch(k=b"2", large=b"small now"))
            assert reader.wait_for_epoch(Epoch.from_ms(1), 20) == Epoch.from_ms(2)
            with reader.snapshot() as view:
                assert dict(view.scan()) == {b"k": b"2", b"large": b"small now"}
            with reader.snapshot(Epoch.from_ms(1)) as view:
                assert dict(view.scan()) == {b"k": b"1", b"large": LARGE}
            reader.unpin("p")
            with pytest.raises(EpochNotHeld):
                reader.snapshot(Epoch.from_ms(1))
        with open_writer(location, takeover=True) as new:
            with pytest.raises(WriterFenced):
                store.seal(Epoch.from_ms(3), batch(k=b"stale", large=LARGE))
            new.seal(Epoch.from_ms(3), batch(k=b"3"))
            with new.snapshot() as view:
                assert view.get(b"k") == b"3"


def test_large_values_that_nobody_needs_and_probes_of_readers_go_on_an_s3_mock_server(location: str) -> None:
    with open_object_writer(location.removeprefix("slatedb+"), garbage_seconds=0) as store:
        store.seal(Epoch.from_ms(1), batch(k=LARGE))
        place = store._place
        with open_reader(location) as reader:
            assert place.names("db/probe") == []
            reader.pin("p")
            store.seal(Epoch.from_ms(2), batch(k=b"small"))
            time.sleep(1.5)
            with reader.snapshot(Epoch.from_ms(1)) as view:
                assert view.get(b"k") == LARGE
            reader.unpin("p")
            deadline = time.monotonic() + 20
            while (left := place.names("values/")) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left == []


def test_a_killed_writer_on_an_s3_mock_server_is_succeeded_at_once(location: str) -> None:
    script = """
import sys, time
from headwater.state import WriteBatch, open_writer
from headwater.stream.epoch import Epoch
store = open_writer(sys.argv[1])
for number in range(1, 1000):
    made = WriteBatch()
    made.put(b"k", str(number).encode())
    store.seal(Epoch.from_ms(number), made)
    print(number, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script, location], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(5)][-1]
    os.kill(child.pid, signal.SIGKILL)
    rest = child.communicate()[0].split()
    acknowledged = int(rest[-1]) if rest else acknowledged
    with open_writer(location) as store, store.snapshot() as view:
        assert view.epoch.ms in (acknowledged, acknowledged + 1)
        assert view.get(b"k") == str(view.epoch.ms).encode()


def test_an_unreachable_server_is_a_transient_error_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setattr("headwater.state.engines.slate.RETRY_SECONDS", 0.5)
    with pytest.raises(StoreUnavailable) as caught:
        open_writer("slatedb+s3://lake/x?endpoint=http://127.0.0.1:9&region=us-east-1")
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "slatedb+s3://",
        "slatedb+s3://b/p?password=very-secret",
        "slatedb+s3://key:very-secret@b/p",
        "slatedb+s3://b/p?endpoint=https://key:very-secret@host",
        "slatedb+file://host/p",
    ],
)
def test_bad_object_store_urls_are_refused(url: str) -> None:
    for open_it in (open_writer, open_reader):
        with pytest.raises(InvalidLocation) as caught:
            open_it(url)
        assert "very-secret" not in str(caught.value)


def test_a_stream_is_written_once_to_an_s3_mock_server(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_writer, "INLINE_BYTES", 0)
    writer = DrivenWriter(tmp_path, key="id", store=location)
    messages = writer.stage(0, [(1, "a")])
    assert len(staged_files(location)) == 1
    writer.commit(0, messages)
    writer.batch(0, [(1, "a")])
    writer.batch(1, [(2, "b")])
    assert staged_files(location) == []
    with open_reader(location) as reader, reader.snapshot() as view:
        assert [end.rows for end in LogView.open(view, LOG).epochs()] == [1, 1]


def staged_files(location: str) -> list[str]:
    found = stream_writer.StagedRows(location)._storage.list()
    return [info.path for info in found if info.path.endswith(".arrow")]
