"""Real Postgres servers for tests: one cluster in a temporary directory, ended with the process that started it.

A server listens on loopback and on a unix socket, runs as an unprivileged user when the tests run as root, and has
``wal_level=logical``. A watchdog process holds a pipe to us: when we are gone, also by ``kill -9``, it ends the server
and removes its files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from tests.servers.binaries import PostgresBinaries, postgres_binaries, reachable_by_others

VERSIONS = (15, 16, 18) if "HEADWATER_SOAK" in os.environ else (15, 18)
NEWEST = VERSIONS[-1]
SUPERUSER = "postgres"
STANDBY = "standby"

_SETTINGS: dict[str, str] = {
    "autovacuum_naptime": "1h",
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "log_line_prefix": "%m [%p] %d ",
    "max_connections": "60",
    "max_prepared_transactions": "10",
    "max_replication_slots": "30",
    "max_wal_senders": "30",
    "shared_buffers": "32MB",
    "wal_level": "logical",
}

_WATCHDOG = """
cat >/dev/null
pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$1/data" ]; then kill -QUIT "$pid"; sleep 1; fi
rm -rf "$1"
"""

_END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
_DROP_SLOTS = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s"


class PostgresServer:
    """One cluster and its server process.

    :param major: the version, one of :data:`VERSIONS`.
    :param settings: over those of this module, as ``postgresql.conf`` spells them.
    :param primary: be a standby of this server, through a physical slot there of the name ``standby``.
    """

    def __init__(
        self,
        major: int = NEWEST,
        settings: Mapping[str, str] | None = None,
        *,
        primary: PostgresServer | None = None,
    ) -> None:
        binaries = postgres_binaries(major)
        self.major = major
        self.version = binaries.version
        self.password: str = primary.password if primary else secrets.token_hex(8)
        self.settings = {**_SETTINGS, **(settings or {})}
        self.base = Path(tempfile.mkdtemp(prefix=f"headwater-pg{major}-", dir="/tmp"))
        self.data = self.base / "data"
        self.port = 0
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._databases = itertools.count(1)
        try:
            self._own(self.base)
            self._binaries = self._within_reach(binaries)
            self._watchdog = subprocess.Popen(
                ["sh", "-c", _WATCHDOG, "watchdog", str(self.base)], stdin=subprocess.PIPE, start_new_session=True
            )
            if primary is None:
                self._make_cluster()
            else:
                self._copy_cluster(primary)
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What the server wrote to its log."""
        return (self.base / "log").read_text(errors="replace")

    def dsn(self, database: str = "postgres", *, user: str = SUPERUSER, password: str | None = None) -> str:
        """A TCP address with the password."""
        secret = self.password if password is None else password
        return f"postgresql://{quote(user)}:{secret}@127.0.0.1:{self.port}/{quote(database)}"

    def socket_dsn(self, database: str = "postgres", *, user: str = SUPERUSER) -> str:
        """An address by unix socket, without a password."""
        return make_conninfo(host=str(self.base), port=self.port, dbname=database, user=user)

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit connection of the superuser."""
        return psycopg.connect(self.socket_dsn(database), autocommit=True)

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """A fresh database, dropped with its slots and roles at the end."""
        name = f"db{next(self._databases)}"
        with self.connect() as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        database = Database(self, name)
        try:
            yield database
        finally:
            if self.is_running:
                database.drop()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it takes connections; the port stays the same over restarts."""
        for attempt in range(5):
            self.port = self.port or _free_port()
            options = [f"-c{name}={value}" for name, value in self.settings.items()]
            options += [f"-cport={self.port}", f"-cunix_socket_directories={self.base}"]
            with (self.base / "log").open("ab") as log:
                self._process = self._spawn("postgres", "-D", str(self.data), *options, output=log)
            if self._ready():
                return
            if "Address already in use" not in self.log or attempt == 4:
                raise RuntimeError(f"Postgres {self.version} did not start:\n{self.log[-4000:]}")
            self.port = 0

    def stop(self) -> None:
        """A fast shutdown: sessions are ended, nothing is lost."""
        self._end(signal.SIGINT)

    def restart(self, settings: Mapping[str, str] | None = None) -> None:
        """Stop and start, from then on with *settings* over the present ones."""
        self.stop()
        self.settings.update(settings or {})
        self.start()

    def kill9(self) -> None:
        """Kill every process of the server at once, as a power cut does to processes."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + 20
        while pids := _processes_in(self.data):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"Processes {pids} of the server do not end.")
            time.sleep(0.01)
        self._process = None

    def promote(self) -> None:
        """Make the standby a primary, and wait until it is one."""
        with self.connect() as admin:
            assert admin.execute("SELECT pg_promote(wait_seconds => 60)").fetchone() == (True,)

    def reload(self, **settings: str) -> None:
        """Change settings that need no restart and wait until the server took them."""
        with self.connect() as admin:
            for name, value in settings.items():
                admin.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
            before = admin.execute("SELECT pg_conf_load_time()").fetchone()
            admin.execute("SELECT pg_reload_conf()")
            deadline = time.monotonic() + 20
            while admin.execute("SELECT pg_conf_load_time()").fetchone() == before:
                if time.monotonic() > deadline:
                    raise RuntimeError("The server did not reload its settings.")
                time.sleep(0.01)

    def close(self) -> None:
        """End the server and remove its files."""
        if self._process is not None:
            self._end(signal.SIGQUIT)
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.wait()
            self._watchdog = None
        shutil.rmtree(self.base, ignore_errors=True)

    def run(self, program: str, *arguments: str) -> None:
        """Run one of the installation's programs as the server's user, to its end.

        :raises RuntimeError: when it fails; the text is what it wrote.
        """
        with (self.base / "programs").open("ab") as output:
            code = self._spawn(program, *arguments, output=output).wait()
        if code:
            written = (self.base / "programs").read_text(errors="replace")
            raise RuntimeError(f"{program} ended with {code}:\n{written[-4000:]}")

    def _make_cluster(self) -> None:
        password = self.base / "password"
        password.write_text(self.password)
        password.chmod(0o600)
        self._own(password)
        self.run(
            "initdb",
            *("-D", str(self.data), "-U", SUPERUSER, "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"),
            *("--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"),
        )
        password.unlink()

    def _copy_cluster(self, primary: PostgresServer) -> None:
        source = make_conninfo(primary.socket_dsn(), dbname="")
        self.run(
            "pg_basebackup",
            *("-D", str(self.data), "-d", source, "--checkpoint=fast", "--no-sync"),
            *("--create-slot", f"--slot={STANDBY}"),
        )
        (self.data / "standby.signal").touch()
        self._own(self.data / "standby.signal")
        self.settings |= {
            "primary_conninfo": primary.socket_dsn(),
            "primary_slot_name": STANDBY,
            "wal_retrieve_retry_interval": "100ms",
        }

    def _within_reach(self, binaries: PostgresBinaries) -> PostgresBinaries:
        """The server's user may not enter a checkout under ``/root``: it then gets a copy."""
        if self._user is None or reachable_by_others(binaries.bin):
            return binaries
        copy = self.base / "installation"
        shutil.copytree(binaries.bin.parent, copy, symlinks=True)
        return PostgresBinaries(copy / binaries.bin.name, binaries.version, binaries.libraries)

    def _own(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _spawn(self, program: str, *arguments: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
        environment |= {"LC_ALL": "C", "TZ": "UTC", "HOME": str(self.base)}
        if self._binaries.libraries is not None:
            environment["LD_LIBRARY_PATH"] = str(self._binaries.libraries)
        identity: dict[str, Any] = {}
        if self._user is not None:
            identity = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return subprocess.Popen(
            [self._binaries.program(program), *arguments],
            cwd=self.base,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            **identity,
        )

    def _ready(self) -> bool:
        deadline = time.monotonic() + 60
        while self.is_running and time.monotonic() < deadline:
            try:
                psycopg.connect(self.socket_dsn(), connect_timeout=5).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.02)
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill9()
        self._process = None


class Database:
    """A fresh database of a server, with roles of its own."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server = server
        self.name = name
        self._roles: list[str] = []

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    @property
    def socket_dsn(self) -> str:
        return self.server.socket_dsn(self.name)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit connection of the superuser."""
        return self.server.connect(self.name)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; the rows of the last."""
        rows: list[tuple[Any, ...]] = []
        with self.connect() as session:
            for statement in statements:
                cursor = session.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def value(self, statement: str) -> Any:
        """The first value of the first row."""
        return self.execute(statement)[0][0]

    def role(self, name: str, options: str = "") -> str:
        """Make a role that may log in, with *options* such as ``REPLICATION``; gives its name, unique in the server."""
        role = f"{self.name}_{name}"
        self.execute(f"CREATE ROLE \"{role}\" LOGIN PASSWORD '{self.server.password}' {options}")
        self._roles.append(role)
        return role

    def dsn_of(self, role: str) -> str:
        """The TCP address as *role*."""
        return self.server.dsn(self.name, user=role)

    def drop(self) -> None:
        """Drop it with its sessions, prepared transactions, slots and roles."""
        with self.connect() as session:
            for (gid,) in session.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
                session.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            for role in self._roles:
                session.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        name = sql.Identifier(self.name)
        with self.server.connect() as admin:
            admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
            deadline = time.monotonic() + 30
            while admin.execute(_END_SESSIONS, [self.name]).fetchall():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Sessions of {self.name} do not end.")
                time.sleep(0.01)
            admin.execute(_DROP_SLOTS, [self.name])
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))
            for role in self._roles:
                admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _processes_in(directory: Path) -> list[int]:
    """Processes that work in *directory*, as every process of a Postgres server does in its data directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == directory:
                    found.append(int(entry.name))
    return found
