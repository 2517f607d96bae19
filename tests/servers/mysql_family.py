"""The servers of the MySQL family that the tests run on, with the settings that a capture needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql import MySqlServer

LOGGED: Final = {
    "server-id": "1",
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
}
MARIADB: Final = {**LOGGED, "gtid-strict-mode": "ON", "log-slave-updates": "ON"}
MYSQL: Final = {**LOGGED, "gtid-mode": "ON", "enforce-gtid-consistency": "ON"}
FILES: Final = {**LOGGED, "gtid-mode": "OFF", "enforce-gtid-consistency": "OFF"}
"""A MySQL that does not number its transactions."""

FAMILY: Final = ("mariadb", "mysql")


def start_server(family: str, settings: Mapping[str, str] | None = None) -> MariaDbServer:
    """:param settings: over those that a capture needs. :raises FileNotFoundError: it is not on this machine."""
    if family == "mariadb":
        return MariaDbServer({**MARIADB, **(settings or {})})
    return MySqlServer({**MYSQL, **(settings or {})})
