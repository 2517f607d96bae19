"""Iceberg tables in an object store, over HTTP against moto's S3 server: a mock, because no S3 server is here.

It shows our paths, staging and options; not S3's latencies and partial failures.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.sinks import iceberg_waste
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Committed, Mode

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order
from .iceberg_tables import scan, statuses
from .test_delta_object_store import SERVER


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    port = next(int(line) for line in server.stdout if line.strip().isdigit())
    url = f"http://127.0.0.1:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/lake", method="PUT")).close()
    yield {
        "s3.endpoint": url,
        "s3.access-key-id": "key",
        "s3.secret-access-key": "secret",
        "s3.region": "us-east-1",
    }
    server.kill()
    server.communicate()


def sink_in(options: dict[str, str], tmp_path: Path, name: str, mode: Mode = Mode.MIRROR) -> IcebergSink:
    uri = f"sqlite:///{tmp_path}/catalog.db"
    made = IcebergSink(f"s3://lake/{name}", mode, catalog_uri=uri, catalog_options=options, retention_hours=0)
    again: IcebergSink = pickle.loads(pickle.dumps(made))
    return again


def test_a_mirror_in_a_bucket(options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_waste, "KEPT_SNAPSHOTS", 1)
    monkeypatch.setattr(iceberg_waste, "EXPIRED_SNAPSHOTS", 1)
    sink = sink_in(options, tmp_path, "mirror")
    assert "secret" not in repr(sink)
    sink.check()
    feed = Feed(sink)
    assert feed.history(1, [order(key) for key in range(4)])
    assert feed.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(9)))
    assert statuses(sink) == {0: "new", 1: "paid", 3: "new", 9: "new"}
    token = feed.token(2)
    many = feed.stage_changes(token, [(INSERT, order(key, "x" * 200)) for key in range(100, 3000)])
    assert [info for info in sink._root.list() if info.path.endswith(".arrow")]
    assert sink.commit(ORDERS, token, [many])
    assert not [info for info in sink._root.list() if info.path.endswith(".arrow")]
    assert not feed.changes(2, (INSERT, order(5000)))
    for epoch in range(3, 8):
        assert feed.changes(epoch, (UPDATE, order(0, f"at {epoch}")))
    assert len(statuses(sink)) == 2904
    assert sink.committed(ORDERS, "q", "b1") == Committed(7, 1, 0)
    feed.stage_history(feed.token(0, 2), [order(7000)])
    before = len(sink._root.list("public/orders/data"))
    sink.abort(ORDERS, "q", 1)
    assert len(sink._root.list("public/orders/data")) == before - 1
    assert sum(batch.num_rows for batch in sink.shown(ORDERS, ["id"])) == 2904


@pytest.mark.parametrize("mode", [Mode.CHANGES, Mode.HISTORY])
def test_other_modes_in_a_bucket(options: dict[str, str], tmp_path: Path, mode: Mode) -> None:
    sink = sink_in(options, tmp_path, mode.value, mode)
    feed = Feed(sink)
    feed.history(1, [order(1)])
    feed.changes(1, (UPDATE, order(1, "paid")))
    assert [row["status"] for row in scan(sink).sort_by("_commit_version").to_pylist()] == ["new", "paid"]
