"""The data source ``headwater``: a table of a database as a DataFrame, as it is or as it changes.

>>> spark.readStream.format("headwater").option("table", "public.orders").load()  # doctest: +SKIP

The options are those of :mod:`headwater.spark.options`. Spark finds it without registration: it imports this module in
every session, so what only a read needs is imported by the read.
"""

from __future__ import annotations

from pyspark.sql import types as st
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader


class HeadwaterDataSource(DataSource):
    """``spark.read`` and ``spark.readStream``; nothing can be written to it."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> st.StructType:
        """The columns that the table has, then those that we add."""
        from headwater.spark.columns import discovered
        from headwater.spark.options import SourceOptions
        from headwater.spark.tables import find_table

        options = SourceOptions.parse(self.options)
        return discovered(find_table(options), options.columns)

    def reader(self, schema: st.StructType) -> DataSourceReader:
        from headwater.spark.batch_reader import batch_reader
        from headwater.spark.options import SourceOptions

        return batch_reader(SourceOptions.parse(self.options), schema)

    def streamReader(self, schema: st.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from headwater.spark.options import SourceOptions
        from headwater.spark.stream_reader import HeadwaterStreamReader

        return HeadwaterStreamReader(SourceOptions.parse(self.options), schema)
