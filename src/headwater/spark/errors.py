"""Errors of the part that runs on Spark: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import ConflictError, HeadwaterError, InputError, NotFoundError, TransientError


class SparkError(HeadwaterError):
    """Any error of :mod:`headwater.spark`."""


class JavaMissing(SparkError, InputError):
    """Spark needs Java, and there is none, or one that is too old."""


class SparkMissing(SparkError, InputError):
    """PySpark is not installed."""


class UnsupportedSpark(SparkError, InputError):
    """The installed PySpark is too old or too new, or lacks an API that was asked for."""


class InvalidOption(SparkError, InputError):
    """An option of the data source that there is not, or a value that it cannot have."""


class UnsupportedSchema(SparkError, InputError):
    """Columns that cannot be given as they were asked for."""


class NoCapture(SparkError, NotFoundError):
    """Nobody captures the table into the store."""


class TableChanged(SparkError, ConflictError):
    """The table was truncated, or its columns changed, in a way that a person decides about."""


class StreamRuns(SparkError, ConflictError):
    """Another stream of the same name runs."""


class HistoryWaits(SparkError, TransientError):
    """The history of a table has not gone on for long, and a query that is to end with all of it cannot."""
