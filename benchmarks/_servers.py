"""The real servers of the tests, for benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.db.mysql.binlog_reading import packets_of, plan_of
from tests.servers.mariadb import MariaDbServer
from tests.servers.mongodb import MongoServer
from tests.servers.mysql_family import start_server
from tests.servers.postgres import Database, PostgresServer

__all__ = ["Database", "MariaDbServer", "MongoServer", "PostgresServer", "packets_of", "plan_of", "start_server"]
