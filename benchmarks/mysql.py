"""MySQL and MariaDB: the binlog to columns, and a snapshot through Spark to nowhere."""

from __future__ import annotations

from _harness import Figure, main
from _mysql_decode import measure_decode
from _mysql_snapshot import measure_snapshot


def measure(quick: bool) -> list[Figure]:
    return [*measure_decode(quick), *measure_snapshot(quick)]


if __name__ == "__main__":
    main(__doc__, measure)
