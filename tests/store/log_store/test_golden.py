"""Stores written by every release so far are read as they were written."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.log_store.make import rows_of

from headwater.log_store import KvLogStoreFactory, LogCorrupt, LogView, UnknownVersion
from headwater.log_store.migration import Migration
from headwater.log_store.status import log_status
from headwater.state import StateStore, WriteBatch, open_writer
from headwater.stream import Epoch

FILES = sorted((Path(__file__).parents[2] / "fixtures/log_store").glob("*.json"))


def restored(golden: dict[str, Any], **changed: str) -> StateStore:
    store = open_writer(f"memory://{uuid.uuid4()}")
    batch = WriteBatch()
    for key, value in golden["cells"]:
        batch.put(bytes.fromhex(key), bytes.fromhex(changed.get(f"k{key}", value)))
    store.seal(golden["epoch"], batch)
    return store


@pytest.fixture(params=FILES, ids=[path.stem for path in FILES])
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def by_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["_epoch"], row["_seq"]))


def test_there_is_a_file_of_each_format_and_compression() -> None:
    assert [path.stem for path in FILES] == [
        "format1",
        "format1_checked",
        "format2",
        "format2_checked",
        "format2_checked_lz4",
        "format2_lz4",
        "format2_zstd",
    ]


def test_rows_and_epochs_are_what_they_were(golden: dict[str, Any]) -> None:
    with restored(golden) as store, store.snapshot() as view:
        shown = LogView.open(view, "public.orders")
        assert rows_of(shown, 0, shown.sealed) == golden["rows"]
        ends = [[int(end.epoch), end.rows, end.is_checkpoint, end.is_stop] for end in shown.epochs()]
        assert ends == golden["epochs"]
        assert shown.log.schema_version == 2
        assert shown.log.schema.names[-1] == "note"
        assert [status.name for status in log_status(store)] == ["public.orders"]


def test_a_writer_of_today_goes_on_and_migrates_it(golden: dict[str, Any]) -> None:
    with restored(golden) as store:
        factory = KvLogStoreFactory(store)
        migration = Migration(factory, "public.orders")
        while not migration.step():
            factory.sealer.seal(Epoch(store.committed_epoch() + 65536))
        factory.sealer.seal(Epoch(store.committed_epoch() + 65536))
        with store.snapshot() as view:
            shown = LogView.open(view, "public.orders")
            assert by_place(rows_of(shown, 0, shown.sealed)) == by_place(golden["rows"])
            assert {end.formats.numbers for end in shown.epochs()} == {(2,)}
        factory.close()


def _data(golden: dict[str, Any]) -> tuple[str, str]:
    """The first row or chunk."""
    cell: tuple[str, str] = next(
        (key, value) for key, value in golden["cells"] if key.startswith(("8000000100", "8000000101"))
    )
    return cell


def test_values_cut_short_and_of_a_later_format_are_refused(golden: dict[str, Any]) -> None:
    key, value = _data(golden)
    for wrong, error in ((value[:-40], LogCorrupt), (value[:8], LogCorrupt), ("09" + value[2:], UnknownVersion)):
        with restored(golden, **{f"k{key}": wrong}) as store, store.snapshot() as view:
            shown = LogView.open(view, "public.orders")
            with pytest.raises(error):
                rows_of(shown, 0, shown.sealed)


def test_an_epoch_of_a_later_format_says_that_headwater_is_too_old(golden: dict[str, Any]) -> None:
    key, value = next((key, value) for key, value in golden["cells"] if key.startswith("8000000102"))
    record = json.loads(bytes.fromhex(value))
    record.pop("crc", None)
    later = json.dumps({**record, "format": 3}).encode().hex()
    with restored(golden, **{f"k{key}": later}) as store, store.snapshot() as view:
        shown = LogView.open(view, "public.orders")
        with pytest.raises(UnknownVersion, match="Upgrade headwater"):
            rows_of(shown, 0, shown.sealed)
    foreign = json.dumps({**record, "v": 2}).encode().hex()
    with restored(golden, **{f"k{key}": foreign}) as store, store.snapshot() as view, pytest.raises(UnknownVersion):
        list(LogView.open(view, "public.orders").epochs())
