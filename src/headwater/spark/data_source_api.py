"""The names of PySpark's data source API that the format ``headwater`` uses, on every PySpark from 4.0 on.

=======  =================================================================  ======================================
PySpark  adds                                                               before
=======  =================================================================  ======================================
4.0      data sources in Python                                             the format is not available
4.1      ``DataSourceStreamArrowWriter``, filters for readers               a class that does the same; no filters
4.2      start and limit for ``latestOffset``, *available now* by batches   :class:`BatchStarts`; one batch
=======  =================================================================  ======================================

We look for the names, not at the version: vendors backport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.spark.errors import TableChanged, UnsupportedSpark
from headwater.spark.spark_version import installed_spark

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        InputPartition,
        WriterCommitMessage,
    )
except ImportError:
    raise UnsupportedSpark(
        f"PySpark {installed_spark()} has no data sources in Python, which the format 'headwater' needs.",
        next_step="Upgrade: pip install 'pyspark>=4.0,<5'. Pipelines (headwater run) need no upgrade.",
    ) from None

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:

    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):  # type: ignore[no-redef, misc]
        """Gets record batches, too."""


try:
    from pyspark.sql.datasource import (
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )
except ImportError:  # no reader is ever given one

    class Filter:  # type: ignore[no-redef]
        """A condition."""

    class EqualTo(Filter):  # type: ignore[no-redef]
        """Equal."""

    GreaterThan = GreaterThanOrEqual = In = LessThan = LessThanOrEqual = EqualTo  # type: ignore[misc, assignment]

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # nobody asks for a limit

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch has."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """No limit."""

    @dataclass(frozen=True)
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """A number of rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Spark does not look at it."""


class BatchStarts:
    """Knows where the next batch of a stream begins, also where Spark does not pass it to ``latestOffset``.

    Before 4.2 a run begins with ``partitions(end, end)`` of the newest batch in the checkpoint, if there is one; after
    that each batch begins where the one before ended. :meth:`check` compares that with what Spark reads.
    """

    def __init__(self) -> None:
        self._end: dict[str, Any] | None = None
        self._planned: tuple[dict[str, Any], dict[str, Any]] | None = None

    def start(self, given: dict[str, Any] | None, initial: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Where the next batch begins: *given* by Spark, the end of the last batch, or *initial* for a new stream."""
        return given or self._end or initial()

    def planned(self, start: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        """*end*, which Spark gets as the answer to ``latestOffset``."""
        self._end = end
        if end != start:
            self._planned = (start, end)
        return end

    def check(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Call it in ``partitions``. :raises TableChanged: Spark's batch begins elsewhere than was assumed."""
        if self._end is None:
            self._end = end
        if self._planned is not None and self._planned[1] == end != start and self._planned[0] != start:
            raise TableChanged(
                f"Spark begins a batch at {start}; it was planned from {self._planned[0]}.",
                next_step="Unset spark.sql.streaming.triggerAvailableNowWrapper.enabled, and start the query again.",
            )


__all__ = [
    "BatchStarts",
    "DataSource",
    "DataSourceReader",
    "DataSourceStreamArrowWriter",
    "DataSourceStreamReader",
    "DataSourceStreamWriter",
    "EqualTo",
    "Filter",
    "GreaterThan",
    "GreaterThanOrEqual",
    "In",
    "InputPartition",
    "LessThan",
    "LessThanOrEqual",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
]
