"""The real servers of the tests, for benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.servers.postgres import Database, PostgresServer

__all__ = ["Database", "PostgresServer"]
