"""The object-store engine when an answer is lost or the store is away, against moto's S3 server behind a proxy."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.servers.losing_proxy import LosingProxy, losing_proxy
from tests.servers.s3 import s3_server

from headwater.state import WriteBatch, open_reader, open_writer
from headwater.state.errors import StoreUnavailable
from headwater.stream.epoch import Epoch

LARGE = os.urandom(20_000)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def shared_proxy(endpoint: str) -> Iterator[LosingProxy]:
    with losing_proxy(endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: LosingProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[LosingProxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("headwater.state.engines.slate.RETRY_SECONDS", 0.5)
    yield shared_proxy
    shared_proxy.come_back()


@pytest.fixture
def location(proxy: LosingProxy, request: pytest.FixtureRequest) -> str:
    return f"slatedb+s3://lake/{abs(hash(request.node.name))}?endpoint={proxy.url}&region=us-east-1"


def batch(**cells: bytes) -> WriteBatch:
    writes = WriteBatch()
    for key, value in cells.items():
        writes.put(key.encode(), value)
    return writes


@pytest.mark.parametrize("status", [0, pytest.param(500, marks=pytest.mark.soak)])
def test_lost_answers_to_a_claim_and_to_a_seal_on_an_s3_mock_server(
    proxy: LosingProxy, location: str, status: int
) -> None:
    """The client asks again, and is refused by its own object."""
    proxy.lose(r"/owner/.*", status)
    with open_writer(location) as store:
        for pattern in (r"/values/.*", r"/wal/\d+\.sst"):
            proxy.lose(pattern, status)
        store.seal(Epoch.from_ms(1), batch(k=b"1", large=LARGE))
        assert proxy.left() == ""
        store.seal(Epoch.from_ms(2), batch(k=b"2"))
    with open_reader(location) as reader, reader.snapshot() as view:
        assert (view.epoch, dict(view.scan())) == (Epoch.from_ms(2), {b"k": b"2", b"large": LARGE})


@pytest.mark.soak
@pytest.mark.parametrize("value", [b"small", LARGE], ids=["commit", "values"])
def test_after_a_seal_without_an_answer_the_same_process_opens_an_s3_mock_store_again(
    proxy: LosingProxy, location: str, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    store = open_writer(location)
    store.seal(Epoch.from_ms(1), batch(k=b"1"))
    with monkeypatch.context() as patch:
        patch.setattr("headwater.state.engines.slate.CALL_SECONDS", 0.5)
        proxy.go_away()
        with pytest.raises(StoreUnavailable):
            store.seal(Epoch.from_ms(2), batch(k=value))
        with pytest.raises(StoreUnavailable):
            store.snapshot()
        store.close()
        with pytest.raises(StoreUnavailable):
            open_writer(location)
    proxy.come_back()
    with open_writer(location) as store:
        newest = store.committed_epoch().ms
        with store.snapshot() as view:
            assert (newest, view.get(b"k")) in [(1, b"1"), (2, value)]
        store.seal(Epoch.from_ms(3), batch(k=b"3"))
        with store.snapshot() as view:
            assert dict(view.scan()) == {b"k": b"3"}
