"""An upstream Delta table in an object store, against moto's S3 server: a mock, as no S3 server is here."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.servers.s3 import aws_options, s3_server
from tests.store.test_delta_upstream import FEED, changes, snapshot

from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream, epoch_of
from headwater.backfill.snapshot.consume_upstream.errors import ChangeLogGone, UpstreamDropped, VersionExpired


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, str]]:
    with s3_server() as url:
        yield aws_options(url)


def test_a_table_in_a_bucket_is_read_and_misses_what_vacuum_took(options: dict[str, str]) -> None:
    from deltalake import DeltaTable, write_deltalake

    uri = "s3://lake/upstream orders"

    def table_of(rows: dict[int, str]) -> pa.Table:
        return pa.table({"id": pa.array(list(rows), pa.int64()), "v": list(rows.values())})

    with pytest.raises(UpstreamDropped):
        DeltaUpstream(uri, ("id",), storage=options).newest_epoch()
    write_deltalake(uri, table_of({1: "a", 2: "b"}), configuration=FEED, storage_options=options)
    upstream = DeltaUpstream(uri, ("id",), storage=options)
    upstream.check_snapshot(epoch_of(0))
    assert snapshot(upstream, 0) == {1: "a", 2: "b"}
    write_deltalake(uri, table_of({2: "other"}), mode="overwrite", storage_options=options)
    assert upstream.next_epoch(epoch_of(0)) == epoch_of(1)
    assert sum(cut.rows for cut in upstream.change_cuts(epoch_of(0), epoch_of(1), (0, 256))) == 3
    assert changes(upstream, 0, 1) == [
        (1, "delete", 1, "a"),
        (1, "update_preimage", 2, "b"),
        (1, "update_postimage", 2, "other"),
    ]
    table = DeltaTable(uri, storage_options=options)
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(VersionExpired):
        upstream.check_snapshot(epoch_of(0))
    with pytest.raises(ChangeLogGone):
        upstream.change_cuts(epoch_of(0), epoch_of(1), (0, 256))
    with pytest.raises(ChangeLogGone):
        changes(upstream, 0, 1)
