"""The real servers of the tests, for benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.db.citus.writing import here as rows_here
from tests.db.mysql.binlog_reading import packets_of, plan_of
from tests.servers.binaries import postgres_binaries
from tests.servers.citus_double import CitusDouble, Nodes, log_ends
from tests.servers.kafka import KafkaServer
from tests.servers.mariadb import MariaDbServer
from tests.servers.mongodb import MongoServer
from tests.servers.mysql_family import start_server
from tests.servers.postgres import Database, PostgresServer
from tests.servers.sqlserver_double import wire

__all__ = [
    "CitusDouble",
    "Database",
    "KafkaServer",
    "MariaDbServer",
    "MongoServer",
    "PostgresServer",
    "cluster_nodes",
    "log_ends",
    "packets_of",
    "plan_of",
    "postgres_binaries",
    "rows_here",
    "start_server",
    "wire",
]


@contextmanager
def cluster_nodes(count: int, settings: Mapping[str, str]) -> Iterator[CitusDouble]:
    """A double of a Citus cluster with servers of its own."""
    nodes = Nodes(settings)
    try:
        with CitusDouble([nodes.server(place) for place in range(count)], nodes.name()) as double:
            yield double
    finally:
        nodes.close()
