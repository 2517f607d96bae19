"""The same with an AUTO CDC flow, which keeps the table up to date instead of computing it again.

It needs a catalog whose tables can be merged into (Delta or Iceberg with their jars); a Spark from a wheel has none and
answers AUTOCDC_TARGET_DOES_NOT_SUPPORT_MERGE. With such a catalog, put this file into ``transformations`` in place of
``orders``. ``_position`` orders all changes of a source, also those of one commit; ``_commit_version`` only commits.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()


@dp.temporary_view
def changes_of_orders() -> DataFrame:
    wanted = "id,status,total,_change_type,_position"
    changes = spark.readStream.format("headwater").option("table", "public.orders").option("columns", wanted).load()
    return changes.where("_change_type <> 'update_preimage'")


dp.create_streaming_table("orders")
dp.create_auto_cdc_flow(
    target="orders",
    source="changes_of_orders",
    keys=["id"],
    sequence_by=f.col("_position"),
    apply_as_deletes=f.expr("_change_type = 'delete'"),
    except_column_list=["_change_type", "_position"],
    stored_as_scd_type=1,
)
