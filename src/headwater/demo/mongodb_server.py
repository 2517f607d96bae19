"""A MongoDB of this machine for the demo: a replica set of one in a folder of its own, on loopback, stopped at the end.

Headwater brings no MongoDB with it, and fetches none: one must be there. Where we are root it runs as a user who owns
nothing.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from headwater.errors import HeadwaterError, InputError

_START_SECONDS: Final = 60.0
_USER: Final = "headwater"
_NOBODY: Final = "nobody"


@contextmanager
def local_mongodb(folder: Path) -> Iterator[str]:
    """A replica set of one server; its connection string.

    :raises InputError: MongoDB is not on this machine.
    """
    program, libraries = _program()
    home = Path(tempfile.mkdtemp(prefix="headwater-mongodb-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        home.chmod(0o755)
        run = home / "run"
        (run / "data").mkdir(parents=True)
        (run / "key").write_text(secrets.token_hex(32))
        (run / "key").chmod(0o400)
        shutil.copy(program, home / "mongod")
        if libraries is not None:
            shutil.copytree(libraries, home / "lib")
        if os.geteuid() == 0:
            for place in (run, run / "data", run / "key"):
                shutil.chown(place, _NOBODY)
        port, password, log = _free_port(), secrets.token_hex(8), folder / "mongodb.log"
        process = _started(home, run, port, log)
        yield _wait(process, port, password, log)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _started(home: Path, run: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    settings = {"dbpath": "data", "keyFile": "key", "replSet": "rs0", "bind_ip": "127.0.0.1", "port": str(port)}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home / "lib")} if (home / "lib").is_dir() else None
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(home / "mongod"), *arguments, "--nounixsocket", "--wiredTigerCacheSizeGB", "0.5"],
            cwd=run,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            user=_NOBODY if os.geteuid() == 0 else None,
        )


def _program() -> tuple[Path, Path | None]:
    """Where ``mongod`` is, and a folder with libraries of its own: named, installed, or fetched by our test set-up."""
    named = os.environ.get("HEADWATER_MONGODB")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    installed = shutil.which("mongod")
    roots = [Path(named)] if named else [caches / "headwater" / "servers" / "mongodb"]
    if installed is not None and not named:
        return Path(installed), None
    for root in roots:
        if (root / "bin/mongod").exists():
            return root / "bin/mongod", root / "lib" if (root / "lib").is_dir() else None
    raise InputError(
        "The demo needs a MongoDB server, which is not on this machine.",
        next_step="Install MongoDB 6.0 or later, or set HEADWATER_MONGODB to the folder that has its bin/mongod.",
    )


def _wait(process: subprocess.Popen[bytes], port: int, password: str, log: Path) -> str:
    import pymongo
    from pymongo.errors import OperationFailure, PyMongoError

    deadline = time.monotonic() + _START_SECONDS
    direct = f"mongodb://127.0.0.1:{port}/?directConnection=true&serverSelectionTimeoutMS=2000"
    member = {"_id": 0, "host": f"127.0.0.1:{port}"}
    while True:
        with suppress(PyMongoError), pymongo.MongoClient[dict[str, Any]](direct) as client:
            if client.admin.command("hello")["isWritablePrimary"]:
                client.admin.command({"createUser": _USER, "pwd": password, "roles": ["root"]})
                return f"mongodb://{_USER}:{password}@127.0.0.1:{port}/shop?replicaSet=rs0&authSource=admin"
            with suppress(OperationFailure):  # it is set up, and becomes the primary in a moment
                client.admin.command({"replSetInitiate": {"_id": "rs0", "members": [member]}})
        if process.poll() is not None or time.monotonic() > deadline:
            raise HeadwaterError("MongoDB did not start.", next_step=f"See {log}.")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
