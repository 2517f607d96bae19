"""Where batches of a stream begin, for a PySpark that does not say so; and what an old PySpark is told."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from headwater.spark.data_source_api import BatchStarts
from headwater.spark.errors import TableChanged, UnsupportedSpark

pytestmark = pytest.mark.unit

ZERO, ONE, TWO, THREE = ({"epoch": number} for number in range(4))


def initial() -> dict[str, int]:
    return ZERO


def test_a_new_stream_begins_at_its_initial_offset_and_goes_on_from_each_end() -> None:
    starts = BatchStarts()
    assert starts.start(None, initial) == ZERO
    assert starts.planned(ZERO, ONE) == ONE
    starts.check(ZERO, ONE)
    assert starts.start(None, initial) == ONE
    starts.planned(ONE, ONE)  # nothing to do
    assert starts.start(None, initial) == ONE


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_stream_that_is_started_again_begins_after_its_checkpoint(is_delivered: bool) -> None:
    starts = BatchStarts()
    starts.check(TWO, TWO)
    if not is_delivered:
        starts.check(ONE, TWO)
    assert starts.start(None, initial) == TWO


def test_what_spark_passes_counts() -> None:
    starts = BatchStarts()
    starts.planned(ZERO, ONE)
    assert starts.start(TWO, initial) == TWO


def test_a_batch_that_begins_elsewhere_than_planned_is_not_read() -> None:
    starts = BatchStarts()
    starts.planned(starts.start(None, initial), THREE)
    with pytest.raises(TableChanged, match="triggerAvailableNowWrapper"):
        starts.check(TWO, THREE)


def test_spark_3_5_has_no_data_sources_and_the_error_says_which_version_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for PySpark 3.5: the module of data sources cannot be imported."""
    for name in ("headwater.spark.data_source_api", "headwater.spark.source", "pyspark_headwater"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.sql.datasource", None)
    with pytest.raises(UnsupportedSpark, match=r"no data sources in Python.*pyspark>=4\.0.*headwater run"):
        import_module("pyspark_headwater")
