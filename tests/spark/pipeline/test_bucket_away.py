"""A whole run whose S3 mock refuses the key, then is away: the sink waits, says why, and resumes by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.servers.losing_proxy import LosingProxy, losing_proxy
from tests.servers.postgres import Database
from tests.servers.s3 import aws_options, s3_server
from tests.spark.pipeline.driven import RunningPipeline


class BucketPipeline(RunningPipeline):
    """Its lake is the bucket of the server at *url*, behind *proxy*."""

    def __init__(self, folder: Path, database: Database, url: str, proxy: LosingProxy) -> None:
        options = {**aws_options(proxy.url), "AWS_ACCESS_KEY_ID": "file:key", "retry_timeout": "1s"}
        pairs = ", ".join(f'{name} = "{value}"' for name, value in options.items())
        super().__init__(folder, database, '["orders"]', f"storage_options = {{ {pairs} }}")
        path = folder / "pipeline.toml"
        path.write_text(path.read_text().replace('path = "lake"', f'path = "s3://lake/{folder.name}"'))
        self._url = url

    def mirror(self, table: str) -> list[tuple[Any, ...]]:
        found = DeltaTable(f"s3://lake/{self.folder.name}/{table}", storage_options=aws_options(self._url))
        rows = found.to_pyarrow_table(columns=["id", "name"])
        return sorted(zip(rows["id"].to_pylist(), rows["name"].to_pylist(), strict=True))

    def says(self, words: str) -> bool:
        return words in json.dumps(self.status())


@pytest.fixture
def proxy() -> Iterator[tuple[str, LosingProxy]]:
    with s3_server() as url, losing_proxy(url) as made:
        yield url, made


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_waits_for_a_new_key_and_for_its_bucket(
    newest_postgres: Database, proxy: tuple[str, LosingProxy], tmp_path: Path
) -> None:
    url, store = proxy
    (tmp_path / "key").write_text("key-1")
    store.take_only("key-1")
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)", "INSERT INTO orders VALUES (1, 'a')"
    )
    pipeline = BucketPipeline(tmp_path, newest_postgres, url, store)
    pipeline.start()
    try:
        pipeline.wait_for(lambda: pipeline.status().get("live"))
        pipeline.wait_until_equal("public.orders")
        store.take_only("key-2")
        newest_postgres.execute("INSERT INTO orders VALUES (2, 'b')")
        pipeline.wait_for(lambda: pipeline.says("refused the keys"))
        (tmp_path / "key").write_text("key-2")
        pipeline.wait_until_equal("public.orders")
        store.go_away(503)
        newest_postgres.execute("INSERT INTO orders VALUES (3, 'c')")
        pipeline.wait_for(lambda: pipeline.says("did not answer, or failed"))
        assert not pipeline.says("key-2")
        store.come_back()
        pipeline.wait_until_equal("public.orders")
        assert pipeline.stop() == 0, pipeline.complaints()
    finally:
        pipeline.close()
