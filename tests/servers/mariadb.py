"""Real MariaDB servers for tests: one data directory in a temporary place, ended with the process that started it.

It listens on loopback and on a unix socket. A watchdog process holds a pipe to us: when we are gone, also by
``kill -9``, it ends the server and removes its files.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pymysql
from tests.servers.binaries import mariadb_root

USER = "headwater"

_WATCHDOG = """
cat >/dev/null
pid=$(cat "$1/pid" 2>/dev/null)
if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$1/data" ]; then kill -KILL "$pid"; fi
rm -rf "$1"
"""


class MariaDbServer:
    """One server process. :param settings: over those of this module, as options of ``mariadbd``."""

    kind = "MariaDB"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._root = self._find_root()
        self._settings = dict(settings or {})
        self.password: str = secrets.token_hex(8)
        self.base = Path(tempfile.mkdtemp(prefix="headwater-maria-", dir="/tmp"))
        self.data = self.base / "data"
        (self.base / "tmp").mkdir()
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, "watchdog", str(self.base)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._make_data()
            self.start()
            with self.connect(user="root", unix_socket=str(self.base / "sock")) as admin:
                admin.cursor().execute(f"CREATE USER '{USER}'@'%' IDENTIFIED BY '{self.password}'")
                admin.cursor().execute(f"GRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dsn(self) -> str:
        return f"mysql://{USER}:{self.password}@127.0.0.1:{self.port}/"

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        """An autocommit connection."""
        address = {"host": "127.0.0.1", "port": self.port, "user": USER, "password": self.password}
        if "unix_socket" in options:
            address = {}
        return pymysql.connect(**{**address, "autocommit": True, "charset": "utf8mb4", **options})

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements; the rows of the last."""
        rows: list[tuple[Any, ...]] = []
        with self.connect() as session, session.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
                rows = list(cursor.fetchall())
        return rows

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Its address, with no databases but its own before and after."""
        try:
            yield self.dsn
        finally:
            own = ("information_schema", "mysql", "performance_schema", "sys")
            for (name,) in self.execute("SHOW DATABASES"):
                if name not in own:
                    self.execute(f"DROP DATABASE `{name.replace('`', '``')}`")

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        settings = {
            **self._own_settings,
            "datadir": str(self.data),
            "bind-address": "127.0.0.1",
            "port": str(self.port),
            "socket": str(self.base / "sock"),
            "pid-file": str(self.base / "pid"),
            "innodb-flush-log-at-trx-commit": "0",
            "innodb-buffer-pool-size": "64M",
            **self._settings,
        }
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        if os.geteuid() == 0:
            arguments.append("--user=root")
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._program, "--no-defaults", *arguments],
                cwd=self.base,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                    if probe.recv(4):
                        return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} did not start:\n{(self.base / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill9(self) -> None:
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the server and remove its files."""
        self._end(signal.SIGKILL)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()
        shutil.rmtree(self.base, ignore_errors=True)

    @staticmethod
    def _find_root() -> Path:
        return mariadb_root()

    @property
    def _program(self) -> list[str]:
        return [str(self._root / "usr/sbin/mariadbd")]

    @property
    def _own_settings(self) -> dict[str, str]:
        return {"basedir": str(self._root / "usr"), "lc-messages-dir": str(self._root / "usr/share/mysql")}

    @property
    def _environment(self) -> dict[str, str]:
        libraries = ":".join(str(one) for one in sorted((self._root / "usr/lib").glob("*-linux-gnu*")))
        return {**os.environ, "LD_LIBRARY_PATH": libraries, "TZ": "UTC", "TMPDIR": self._tmp}

    @property
    def _tmp(self) -> str:
        """Of its own: a server that starts removes the temporary tables that it finds, those of others, too."""
        return str(self.base / "tmp")

    def _make_data(self) -> None:
        made = subprocess.run(
            [
                *("sh", str(self._root / "usr/bin/mariadb-install-db"), "--no-defaults"),
                *(f"--basedir={self._root / 'usr'}", "--srcdir=", f"--datadir={self.data}"),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                *(["--user=root"] if os.geteuid() == 0 else []),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise RuntimeError(f"MariaDB's data directory was not made:\n{(made.stdout + made.stderr)[-4000:]}")

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
