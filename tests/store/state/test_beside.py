"""Stores beside a store: each has its own location, whatever its name, and is listed by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.state import WriteBatch, open_writer, stores_beside
from headwater.state.beside import LONGEST_SEGMENT, open_beside_reader, open_beside_writer, remove_beside
from headwater.stream.epoch import Epoch

LONG = [
    "日次売上の集計を外部の分析基盤へ届ける問い合わせ" * 2,
    "схема_заказов." + "таблица_позиций_и_возвратов" * 3,
    "a" * (LONGEST_SEGMENT - 1) + ".",
    "." * LONGEST_SEGMENT,
    "%" * 90,
]
SHORT = ["", "..", "%"]


@pytest.mark.parametrize("name", LONG + SHORT, ids=range(len(LONG + SHORT)))
def test_a_store_is_found_by_its_name_however_long(name: str, tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    open_writer(location).close()
    batch = WriteBatch()
    batch.put(b"k", b"v")
    for parts in ((name, "q"), ("orders", name), (name, name)):
        with open_beside_writer(location, "consumers", *parts) as store:
            store.seal(Epoch.from_ms(1), batch)
    assert stores_beside(location, "consumers", 2) == sorted([(name, "q"), ("orders", name), (name, name)])
    with open_beside_reader(location, "consumers", name, name) as reader, reader.snapshot() as view:
        assert view.get(b"k") == b"v"
    remove_beside(location, "consumers", name, name)
    assert stores_beside(location, "consumers", 2) == sorted([(name, "q"), ("orders", name)])


def test_a_name_that_fits_keeps_the_folder_that_earlier_versions_gave_it(tmp_path: Path) -> None:
    name = "a" * LONGEST_SEGMENT
    open_beside_writer(str(tmp_path), "queries", name).close()
    assert [path.name for path in (tmp_path / "queries").iterdir()] == [name]
