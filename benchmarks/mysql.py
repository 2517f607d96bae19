"""MySQL and MariaDB: the binlog to the durable log and to columns, and a snapshot through Spark to nowhere."""

from __future__ import annotations

from _harness import Figure, main
from _mysql_binlog import measure_binlog
from _mysql_snapshot import measure_snapshot


def measure(quick: bool) -> list[Figure]:
    return [*measure_binlog(quick), *measure_snapshot(quick)]


if __name__ == "__main__":
    main(__doc__, measure)
