"""A MariaDB of this machine for the demo: in a folder of its own, reached by a socket there, stopped at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from headwater.errors import HeadwaterError, InputError

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
