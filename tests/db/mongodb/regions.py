"""A collection that is spread over the shards of a cluster by its region, and somebody who writes to all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pymongo.errors import PyMongoError
from tests.db.mongodb.delivering import TABLE
from tests.db.writing import Writing, writing
from tests.servers.mongodb_cluster import MongoCluster

CUT = 500
PASSING = ("TransientTransactionError", "RetryableWriteError", "UnknownTransactionCommitResult")
COLUMNS = {TABLE: "struct<_id: long, region: int, total: long>"}


def create(cluster: MongoCluster, rows: int = 100) -> None:
    """Documents whose region is below :data:`CUT` are on the first shard, the others on the second."""
    cluster.spread(TABLE, "region", CUT)
    documents = [{"_id": number, "region": number % 2 * CUT, "total": 0} for number in range(rows)]
    if documents:
        cluster.client.shop.orders.insert_many(documents)


def writer(cluster: MongoCluster, rows: int = 600, pause: float = 0.01) -> AbstractContextManager[Writing]:
    """Somebody who writes to both shards at once, and moves documents between them; what breaks off is left alone."""
    orders = cluster.client.shop.orders

    def write(number: int) -> None:
        at = number * 37 % rows
        try:
            with cluster.client.start_session() as session, session.start_transaction():
                orders.update_many({"_id": {"$gte": at, "$lt": at + 6}}, {"$inc": {"total": 1}}, session=session)
                orders.insert_one({"_id": 10_000 + number, "region": number % 2 * CUT, "total": 0}, session=session)
                orders.delete_one({"_id": at + 9}, session=session)
            orders.update_one({"_id": at}, {"$set": {"region": number % 2 * CUT}})
        except PyMongoError as error:
            if not any(map(error.has_error_label, PASSING)):
                raise

    return writing(write, pause)
