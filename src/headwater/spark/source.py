"""The data source ``headwater``: a table of a database as a DataFrame, as it is or as it changes; and streams that are
written into logs of their own, to be read as such a table.

>>> spark.readStream.format("headwater").option("table", "public.orders").load()  # doctest: +SKIP

The options are those of :mod:`headwater.spark.options`, for a table that somebody else keeps those of
:mod:`headwater.spark.upstream_options`, for writing of :mod:`headwater.spark.write_options`. Spark
finds it without registration: it imports this module in every session, so what only a read needs is imported by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import types as st

from headwater.spark.data_source_api import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
)

if TYPE_CHECKING:
    from headwater.spark.options import SourceOptions
    from headwater.spark.upstream_options import UpstreamSourceOptions


class HeadwaterDataSource(DataSource):
    """``spark.read``, ``spark.readStream`` and ``writeStream``."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> st.StructType:
        """The columns that the table has, then those that we add."""
        from headwater.spark.columns import discovered
        from headwater.spark.tables import find_table

        upstream = self._upstream()
        if upstream is not None:
            from headwater.spark.upstream_reader import upstream_table

            return discovered(upstream_table(upstream.for_query()), upstream.columns)
        options = self._settled()
        if options.reads_kept:
            from headwater.spark.kept_reader import kept_schema

            return kept_schema(options)
        return discovered(find_table(options), options.columns)

    def reader(self, schema: st.StructType) -> DataSourceReader:
        from headwater.spark.batch_reader import batch_reader
        from headwater.spark.errors import InvalidOption

        if self._upstream() is not None:
            raise InvalidOption(
                "An upstream table is read as a stream.",
                next_step="Use spark.readStream; a Delta table as it is: spark.read.format('delta').",
            )
        options = self._settled()
        if options.since is not None:
            raise InvalidOption(
                "Option 'since' is one of streams.",
                next_step="Use spark.readStream; of a batch, startEpoch.",
            )
        return batch_reader(options, schema)

    def streamReader(self, schema: st.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from headwater.spark.errors import InvalidOption
        from headwater.spark.stream_reader import HeadwaterStreamReader

        upstream = self._upstream()
        if upstream is not None:
            from headwater.spark.upstream_reader import UpstreamStreamReader

            return UpstreamStreamReader(upstream, schema)
        options = self._settled()
        if options.reads_kept or options.reads_changes:
            raise InvalidOption(
                "Epochs to read at, or between, are of a batch; a stream has its own.",
                next_step="Use spark.read; or leave out asOfEpoch, asOfTimestamp, startEpoch, endEpoch and net, and set"
                " 'since' for the changes from an epoch on.",
            )
        return HeadwaterStreamReader(options, schema)

    def streamWriter(self, schema: st.StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """*overwrite* is the output mode *complete*: every batch has all rows, and replaces those before."""
        from headwater.spark.stream_writer import HeadwaterStreamWriter
        from headwater.spark.write_options import WriteOptions

        return HeadwaterStreamWriter(WriteOptions.parse(self.options), schema, replaces=overwrite)

    def _upstream(self) -> UpstreamSourceOptions | None:
        """The options, if they name an upstream table."""
        from headwater.spark.upstream_options import UpstreamSourceOptions, is_upstream

        return UpstreamSourceOptions.parse(self.options) if is_upstream(self.options) else None

    def _settled(self) -> SourceOptions:
        from headwater.spark.options import SourceOptions
        from headwater.spark.tables import settled

        return settled(SourceOptions.parse(self.options))
