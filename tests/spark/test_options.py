"""The options of the data source: read, checked, and refused with what is valid."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import types as st
from pyspark.sql.datasource import CaseInsensitiveDict

from headwater.spark.errors import InvalidOption
from headwater.spark.option_table import meanings
from headwater.spark.options import SourceOptions
from headwater.spark.source import HeadwaterDataSource

GIVEN = {"source": "postgresql://app:secret@db:5432/shop", "table": "orders"}


def test_names_are_read_in_any_case() -> None:
    read = SourceOptions.parse({"SOURCE": GIVEN["source"], "table": "orders", "maxrows": "7", "onTruncate": "IGNORE"})
    assert (read.max_rows, read.on_truncate, read.history) == (7, "ignore", True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tabel": "t"}, "Did you mean 'table'"),
        ({"max_rows": "1"}, "Did you mean 'maxRows'"),
        ({"maxRows": "0"}, "from 1"),
        ({"rowsPerSecond": "-1"}, "from 0"),
        ({"history": "perhaps"}, "true and false"),
        ({"backfill": "triple"}, "parallel and single"),
        ({"columns": "a,,b"}, "names by commas"),
        ({"startEpoch": "9", "endEpoch": "8"}, "before startEpoch"),
        ({"table": ""}, "No table"),
        ({"asOfEpoch": "1", "startEpoch": "1"}, "asOfEpoch alone"),
        ({"asOfEpoch": "1", "asOfTimestamp": "2026-05-31T12:00:00Z"}, "one of them"),
        ({"asOfEpoch": "yesterday"}, "from 1"),
        ({"asOfTimestamp": "2026-05-31 12:00:00"}, "with its zone"),
        ({"net": "true"}, "startEpoch"),
    ],
)
def test_what_is_wrong_is_told(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        SourceOptions.parse(GIVEN | wrong)


def test_a_kept_table_is_in_the_folder_of_the_store_or_where_it_is_told() -> None:
    plain = SourceOptions.parse({"store": "/data/shop", "table": "t", "asOfEpoch": "newest"})
    assert (plain.tables, plain.as_of, plain.reads_kept) == ("/data/shop/tables", 0, True)
    told = {"store": "slatedb+s3://b/p", "table": "t", "asOfTimestamp": "2021-04-01T00:00:01Z", "tables": "/data/kept"}
    read = SourceOptions.parse(told)
    assert (read.tables, read.as_of_ms) == ("/data/kept", 1_617_235_201_000)


def test_the_source_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_SOURCE", raising=False)
    with pytest.raises(InvalidOption, match="HEADWATER_SOURCE"):
        SourceOptions.parse({"table": "t"})
    monkeypatch.setenv("HEADWATER_SOURCE", GIVEN["source"])
    assert SourceOptions.parse({"table": "t"}).source == GIVEN["source"]


def test_the_password_is_never_shown() -> None:
    read = SourceOptions.parse(GIVEN)
    assert "secret" not in repr(read)
    assert "secret" not in repr(read.for_query("public.orders"))
    assert "secret" not in read.store


def test_each_database_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def store(source: str) -> str:
        return SourceOptions.parse({"source": source, "table": "t"}).store

    one = store("postgresql://app:secret@db:5432/shop")
    assert one.startswith(str(tmp_path / "headwater"))
    assert store("postgresql://other:word@db:5432/shop") == one, "whoever asks"
    assert store("postgresql://app@db:5433/shop") != one
    assert store("postgresql://app@db:5432/shop2") != one


def test_names_of_columns_may_be_quoted() -> None:
    read = SourceOptions.parse(GIVEN | {"columns": 'id, "a,b" ,"say ""hi""",*'})
    assert read.columns == ("id", "a,b", 'say "hi"', "*")


def test_every_option_is_described_here_and_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/spark.md").read_text()
    for name, meaning in meanings(SourceOptions).items():
        assert meaning.endswith(".")
        assert f"`{name}`" in page


@pytest.mark.parametrize("given", [{"asOfEpoch": "newest"}, {"startEpoch": "1"}, {"startEpoch": "1", "net": "true"}])
def test_what_is_of_a_batch_is_refused_for_a_stream(given: dict[str, str], tmp_path: Path) -> None:
    source = HeadwaterDataSource(CaseInsensitiveDict(GIVEN | {"store": str(tmp_path / "store")} | given))
    with pytest.raises(InvalidOption, match=r"of a batch.*since"):
        source.streamReader(st.StructType())


def test_what_is_of_a_stream_is_refused_for_a_batch(tmp_path: Path) -> None:
    source = HeadwaterDataSource(CaseInsensitiveDict(GIVEN | {"store": str(tmp_path / "store"), "since": "65536"}))
    with pytest.raises(InvalidOption, match=r"one of streams.*startEpoch"):
        source.reader(st.StructType())
