"""Two tables from one table of a database: every change, and the table as it is."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()


@dp.table(comment="Every change of public.orders, after the rows that were there.")
def order_changes() -> DataFrame:
    wanted = "id,status,total,_change_type,_commit_version,_commit_timestamp,_position"
    return spark.readStream.format("headwater").option("table", "public.orders").option("columns", wanted).load()


@dp.materialized_view(comment="public.orders as it is: the newest row of each key, without those that were deleted.")
def orders() -> DataFrame:
    changes = spark.read.table("order_changes").where("_change_type <> 'update_preimage'")
    newest = changes.groupBy("id").agg(f.max_by(f.struct("status", "total", "_change_type"), "_position").alias("row"))
    return newest.where("row._change_type <> 'delete'").select("id", "row.status", "row.total")
