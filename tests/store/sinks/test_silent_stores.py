"""Object stores, catalogs, brokers and web servers that take our bytes and say nothing.

Each request ends, and the error names the address and passes: the batch is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.s3 import aws_options
from tests.servers.silent import silent_server

from headwater.backfill.snapshot.consume_upstream.errors import UpstreamUnreadable
from headwater.backfill.snapshot.consume_upstream.upstream_table import open_upstream
from headwater.errors import HeadwaterError
from headwater.sinks import iceberg_client, kafka_channel, storage, webhook
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkUnreachable
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.kafka import KafkaSink
from headwater.sinks.webhook import WebhookSink
from headwater.spark.failure import Failure, Remedy
from headwater.state import open_writer
from headwater.state.engines import slate
from headwater.state.errors import StoreUnavailable

from .file_sinks import INSERT, ORDERS, Feed, order

SECRET = "never-shown"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(storage, "BOUNDS", {"timeout": "300ms", "retry_timeout": "300ms"})
    monkeypatch.setattr(iceberg_client, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(kafka_channel, "SECONDS", 2.0)
    monkeypatch.setattr(slate, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(slate, "RETRY_SECONDS", 0.3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with silent_server() as silent:
        yield silent


def fails(call: Callable[[], object], address: str, kind: type[HeadwaterError] = SinkUnreachable) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert address in str(caught.value)
    assert SECRET not in str(caught.value)
    assert Failure.of(caught.value).remedy is Remedy.RETRY


def delta(address: str) -> DeltaSink:
    options = {**aws_options(f"http://{address}"), "AWS_SECRET_ACCESS_KEY": SECRET}
    return DeltaSink("s3://lake/here", storage_options=options)


def test_a_delta_sink_whose_object_store_is_silent(address: str) -> None:
    sink = delta(address)
    storage._chosen[("s3://lake/here", ORDERS.namespace, ORDERS.name)] = "public.orders"
    for call in (
        sink.check,
        lambda: sink.committed(ORDERS, "q", "b1"),
        lambda: Feed(sink).changes(1, (INSERT, order(1))),
    ):
        fails(call, address)


def test_a_delta_table_upstream_whose_object_store_is_silent(address: str) -> None:
    upstream = open_upstream("delta:s3://lake/up", key=["id"], storage=aws_options(f"http://{address}"))
    fails(upstream.newest_epoch, address, UpstreamUnreadable)


def test_a_rest_catalog_that_is_silent(address: str, tmp_path: Path) -> None:
    for login in ({"token": SECRET}, {"credential": f"id:{SECRET}", "oauth2-server-uri": f"http://{address}/token"}):
        sink = IcebergSink(str(tmp_path), catalog_uri=f"http://{address}", catalog_options=login)
        fails(sink.check, address)
        fails(lambda sink=sink: sink.committed(ORDERS, "q", "b1"), address)  # type: ignore[misc]


@pytest.mark.soak
def test_an_iceberg_warehouse_whose_object_store_is_silent(address: str, tmp_path: Path) -> None:
    options = {"s3.endpoint": f"http://{address}", "s3.region": "us-east-1", "s3.secret-access-key": SECRET}
    options |= {"s3.access-key-id": "key", "s3.request-timeout": "1"}
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    sink = IcebergSink("s3://lake/here", catalog_uri=catalog, catalog_options=options)
    fails(sink.check, address)
    fails(lambda: Feed(sink).changes(1, (INSERT, order(1))), address)


@pytest.mark.soak
def test_brokers_that_are_silent(address: str, tmp_path: Path) -> None:
    settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    settings |= {"sasl.username": "u", "sasl.password": SECRET}
    sink = KafkaSink(brokers=address, staging=str(tmp_path), settings=settings)
    fails(sink.check, address)
    fails(lambda: Feed(sink).changes(1, (INSERT, order(1))), address)


def test_a_web_server_that_is_silent(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "RETRY_SECONDS", 0.4)
    monkeypatch.setattr(webhook, "_sleep", lambda _: None)
    url, headers = f"http://{address}/{SECRET}", {"Authorization": SECRET}
    sink = WebhookSink(url=url, headers=headers, staging=str(tmp_path), timeout_seconds=0.3)
    fails(lambda: Feed(sink).changes(1, (INSERT, order(1))), address)


def test_a_state_store_whose_object_store_is_silent(address: str) -> None:
    location = f"slatedb+s3://lake/here?endpoint=http://{address}&region=us-east-1"
    fails(lambda: open_writer(location), address, StoreUnavailable)
