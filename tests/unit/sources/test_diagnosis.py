"""The warning about connections beyond this machine for which TLS is not asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.databases.secret_files import in_file
from headwater.pipeline.config import configure
from headwater.pipeline.doctor import plain_connections
from headwater.sources.diagnosis import Level, plain_finding

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:secret@db/shop",
        "postgresql://u:secret@10.0.0.1/shop?sslmode=prefer",
        "postgresql://u:secret@localhost,db/shop",
        "postgresql:///shop?host=db",
        "mysql://u:secret@db/shop",
        "mysql://u:secret@db/shop?ssl_mode=DISABLED&ssl_ca=ca.pem",
        "mongodb://u:secret@[2001:db8::1]:27017,a/shop",
        "sqlserver://u:secret@db/shop",
        "http://catalog:8181",
    ],
)
def test_an_address_without_tls_is_warned_of(address: str, tmp_path: Path) -> None:
    found = plain_finding("source", address)
    assert found is not None
    assert found.level is Level.WARNING
    assert "secret" not in found.text
    (tmp_path / "dsn").write_text(address)
    assert plain_finding("source", in_file(tmp_path / "dsn")) == found


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u@127.0.0.1/shop",
        "postgresql://u@[::1]:5432/shop",
        "postgresql:///shop?host=/run/postgresql",
        "postgresql://u@db/shop?sslmode=verify-full",
        "citus://u@db/shop?sslmode=require",
        "mysql://u@localhost/shop",
        "mysql://u@db/shop?ssl_ca=ca.pem",
        "mysql://u@db/shop?ssl-mode=VERIFY_IDENTITY",
        "mongodb://u@a,b/shop?tls=true",
        "mongodb+srv://u@cluster/shop",
        "sqlserver://u@db/shop?cafile=ca.pem",
        "https://catalog:8181",
        "s3://bucket/lake",
    ],
)
def test_others_are_not(address: str) -> None:
    assert plain_finding("source", address) is None


def test_sinks_and_the_store_of_a_pipeline_are_looked_at() -> None:
    def of(*sinks: dict[str, object], store: str = "store") -> list[str]:
        settings = {"pipeline": {"store": store}, "source": {"dsn": "postgresql://db/shop", "tables": ["t"]}}
        return [found.text for found in plain_connections(configure({**settings, "sink": list(sinks)}))]

    assert of({"kind": "postgres", "dsn": "postgresql://u@warehouse/x"}) == [
        "postgres: the connection to warehouse does not have to be encrypted."
    ]
    assert "connection to a does" in of({"kind": "kafka", "brokers": "localhost:9092,a:9092"})[0]
    safe = {"security.protocol": "sasl_ssl"}
    assert of({"kind": "kafka", "brokers": "a:9092", "settings": safe}, {"kind": "delta", "path": "lake"}) == []
    options = {"AWS_ENDPOINT_URL": "http://minio:9000"}
    assert len(of({"kind": "delta", "path": "s3://b/lake", "storage_options": options})) == 1
    assert len(of({"kind": "parquet", "path": "x"}, store="slatedb+s3://b/p?endpoint=http://minio:9000")) == 1
