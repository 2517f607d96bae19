"""MySQL and MariaDB: the binlog to columns."""

from __future__ import annotations

from _harness import Figure, main
from _mysql_decode import measure_decode


def measure(quick: bool) -> list[Figure]:
    return measure_decode(quick)


if __name__ == "__main__":
    main(__doc__, measure)
