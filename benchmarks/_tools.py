"""Programs of the servers' packages that benchmarks run as bounds: psql, pg_recvlogical, mariadb, mysqlbinlog."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _servers import Database, MariaDbServer, postgres_binaries


@dataclass(frozen=True, slots=True)
class Tool:
    """A command with the environment that it needs."""

    command: Sequence[str]
    environment: Mapping[str, str]

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it; its output is thrown away unless *options* say otherwise."""
        return subprocess.Popen(self.command, **{"env": self.environment, "stdout": subprocess.DEVNULL, **options})

    def run(self, **options: Any) -> float:
        """Run it to its end; the seconds of processor time that it took. :raises RuntimeError: it failed."""
        process = self.start(**options)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        check(self, process)
        return used.ru_utime + used.ru_stime


def check(tool: Tool, process: subprocess.Popen[bytes]) -> None:
    """Wait for its end. :raises RuntimeError: it failed."""
    if process.wait():
        raise RuntimeError(f"{Path(tool.command[0]).name} ended with {process.returncode}.")


def side_by_side(*tools: Tool) -> None:
    """Run several at the same time. :raises RuntimeError: one failed."""
    for tool, process in [(tool, tool.start()) for tool in tools]:
        check(tool, process)


def psql(database: Database, *commands: str) -> Tool:
    arguments = [part for command in commands for part in ("-c", command)]
    return _postgres(database.server.major, "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", database.dsn, *arguments)


def pg_recvlogical(database: Database, slot: str, publication: str, end: str) -> Tool:
    """Receive what a capture receives, up to the position *end*, and throw it away."""
    options = {"proto_version": "2", "publication_names": publication, "streaming": "on", "messages": "true"}
    return _postgres(
        database.server.major,
        "pg_recvlogical",
        *("-d", database.dsn, "--start", "-S", slot, "--no-loop", "-E", end, "-f", "/dev/null"),
        *(f"--option={name}={value}" for name, value in options.items()),
    )


def _postgres(major: int, program: str, *arguments: str) -> Tool:
    binaries = postgres_binaries(major)
    libraries = {} if binaries.libraries is None else {"LD_LIBRARY_PATH": str(binaries.libraries)}
    return Tool([binaries.program(program), *arguments], os.environ | libraries)


def mariadb(server: MariaDbServer, statement: str, *options: str) -> Tool:
    """MariaDB's client, which also talks to a MySQL server."""
    client = [str(server._root / "usr/bin/mariadb"), *_address(server), *options, "-e", statement]
    return Tool(client, _environment(server))


def mysqlbinlog(server: MariaDbServer, *arguments: str) -> Tool:
    """The program of the server's own family. :raises FileNotFoundError: it is not installed."""
    program = server._root / "usr/bin" / ("mariadb-binlog" if server.kind == "MariaDB" else "mysqlbinlog")
    if not program.exists():
        raise FileNotFoundError(f"The benchmark needs {program.name}. Run: sh scripts/install_servers.sh")
    loader = server._program[:-1]  # that of MySQL's package
    return Tool([*loader, str(program), *arguments], _environment(server))


def receive_binlog(server: MariaDbServer, first: str, folder: Path) -> Tool:
    """Receive the files from *first* on from the server, and write them as they are to *folder*."""
    remote = ("--read-from-remote-server", "--raw", "--to-last-log", f"--result-file={folder}/")
    plain = () if server.kind == "MariaDB" else ("--ssl-mode=DISABLED", "--get-server-public-key")
    return mysqlbinlog(server, *_address(server), *plain, *remote, first)


def decode_binlog(server: MariaDbServer, names: Sequence[str]) -> Tool:
    """Decode the rows of files on disk to text, and throw it away."""
    files = [str(server.data / name) for name in names]
    return mysqlbinlog(server, "--no-defaults", "--verbose", "--base64-output=decode-rows", *files)


def _address(server: MariaDbServer) -> list[str]:
    return ["--no-defaults", "-h127.0.0.1", f"-P{server.port}", "-uheadwater"]


def _environment(server: MariaDbServer) -> dict[str, str]:
    return {**server._environment, "MYSQL_PWD": server.password}
