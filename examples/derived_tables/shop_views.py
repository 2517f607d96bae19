"""Tables that are derived of a shop's: a transform, an aggregate and a join.

Each function takes a DataFrame for each table and gives one. It runs in the driver; what is called in its columns runs
where the rows are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def open_orders(orders: DataFrame) -> DataFrame:
    """Orders that are not shipped, without what is nobody's business. By the primary key: each row for itself."""
    return orders.where("status <> 'shipped'").select("id", "customer_id", F.round("total", 0).alias("total"))


def sales(orders: DataFrame) -> DataFrame:
    """What each day brought. By ``day``: a day is made anew when one of its orders changes."""
    return orders.groupBy("day").agg(F.count("*").alias("orders"), F.sum("total").alias("total"))


def spending(customers: DataFrame, orders: DataFrame) -> DataFrame:
    """What each customer has spent, those without orders, too. By ``id`` of one and ``customer_id`` of the other."""
    sums = orders.groupBy("customer_id").agg(F.sum("total").alias("spent"))
    joined = customers.join(sums, customers.id == sums.customer_id, "left")
    return joined.select("id", "name", F.coalesce("spent", F.lit(0)).alias("spent"))
