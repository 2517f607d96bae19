"""A Delta mirror in an object store, over HTTP against moto's S3 server: a mock, because no S3 server is here.

It shows our paths, staging and that of two commits one is refused; not S3's latencies and partial failures.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from headwater import failpoints
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import Committed

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


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
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    server.kill()
    server.communicate()


def statuses(sink: DeltaSink) -> dict[int, str]:
    table = DeltaTable(f"{sink.path}/public.orders", storage_options=dict(sink.storage_options))
    return {row["id"]: row["status"] for row in table.to_pyarrow_table().to_pylist()}


def staged_files(sink: DeltaSink) -> list[str]:
    return [info.path for info in sink._root.list() if info.path.endswith(".arrow")]


def test_a_mirror_in_a_bucket(options: dict[str, str]) -> None:
    sink: DeltaSink = pickle.loads(pickle.dumps(DeltaSink("s3://lake/mirror", storage_options=options)))
    assert "secret" not in repr(sink)
    sink.check()
    feed = Feed(sink)
    assert feed.history(1, [order(key) for key in range(4)])
    assert feed.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(9)))
    assert statuses(sink) == {0: "new", 1: "paid", 3: "new", 9: "new"}
    token = feed.token(2)
    many = feed.stage_changes(token, [(INSERT, order(key, "x" * 200)) for key in range(100, 3000)])
    assert staged_files(sink)
    assert sink.commit(ORDERS, token, [many])
    assert not staged_files(sink)
    assert not feed.changes(2, (INSERT, order(5000)))
    assert len(statuses(sink)) == 2904
    assert sink.committed(ORDERS, "q", "b1") == Committed(2, 1, 0)


def test_of_two_commits_of_one_batch_one_is_refused(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSink("s3://lake/zombie", storage_options=options)
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    first, second = (feed.stage_changes(token, [(INSERT, order(2))]) for _ in range(2))
    other: list[Any] = [first]

    def hit(name: str) -> None:
        if name == "sink.delta.before_commit" and other:
            assert sink.commit(ORDERS, token, [other.pop()])

    monkeypatch.setattr(failpoints, "hit", hit)
    assert not sink.commit(ORDERS, token, [second])
    assert statuses(sink) == {1: "new", 2: "new"}
