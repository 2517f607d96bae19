"""A real sharded cluster for tests: a config server, two shards of one member each, and the router that is asked.

Shards write into their logs once a second when nothing else is written: a router gives a change out when all shards
have passed its time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import pymongo
from pymongo.errors import PyMongoError
from tests.servers.binaries import mongodb_root
from tests.servers.mongodb import MongoServer

SHARDS: Final = ("first", "second")
_NOOPS: Final = {"setParameter": "periodicNoopIntervalSecs=1", "oplogSize": "100"}


class MongoCluster(MongoServer):
    """The router, whose process is its own, and behind it the servers of the cluster.

    :ivar config: the config server. :ivar shards: by name.
    """

    program = "mongos"

    def __init__(self) -> None:
        if not (mongodb_root() / "bin" / self.program).exists():
            raise FileNotFoundError("The tests need a router of MongoDB. Run: sh scripts/install_mongodb.sh")
        self._behind = contextlib.ExitStack()
        try:
            self.config = self._behind.enter_context(MongoServer({"configsvr": "", "replSet": "config", **_NOOPS}))
            with ThreadPoolExecutor(len(SHARDS)) as starting:
                self.shards = dict(zip(SHARDS, starting.map(self._shard, SHARDS), strict=True))
        except BaseException:
            self._behind.close()
            raise
        super().__init__({"configdb": f"config/127.0.0.1:{self.config.port}"}, secrets_of=self.config)
        try:
            for name in self.shards:
                self._join(name)
            self.client.admin.command("balancerStop")
        except BaseException:
            self.close()
            raise

    def _shard(self, name: str) -> MongoServer:
        settings = {"shardsvr": "", "replSet": name, **_NOOPS}
        return self._behind.enter_context(MongoServer(settings, secrets_of=self.config))

    def _join(self, name: str) -> None:
        self.client.admin.command({"addShard": f"{name}/127.0.0.1:{self.shards[name].port}", "name": name})

    def add_shard(self, name: str) -> None:
        """Start one more, and take it in; nothing is on it yet."""
        self.shards[name] = self._shard(name)
        self._join(name)

    def remove_shard(self, name: str) -> None:
        """Give a shard up; it goes when nothing is on it any more, which is moved by whoever calls."""
        _until(lambda: bool(self.client.admin.command({"removeShard": name})["state"] == "completed"))

    def close(self) -> None:
        """End all of them, the router first."""
        super().close()
        self._behind.close()

    def address(self, user: str, password: str, database: str = "", **options: str) -> str:
        """The address of the router for a user of the database ``admin``."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"mongodb://{user}:{password}@127.0.0.1:{self.port}/{database}?authSource=admin{more}"

    def spread(self, name: str, key: str, cut: Any) -> None:
        """Shard the collection *name* by *key*: what lies before *cut* on the first shard, the rest on the second."""
        admin = self.client.admin
        admin.command({"enableSharding": name.partition(".")[0], "primaryShard": SHARDS[0]})
        database, _, collection = name.partition(".")
        self.client[database][collection].create_index(key)
        admin.command({"shardCollection": name, "key": {key: 1}})
        admin.command({"split": name, "middle": {key: cut}})
        self.move(name, {key: cut}, SHARDS[1])

    def move(self, name: str, find: dict[str, Any], shard: str) -> None:
        """Move the chunk that has *find* to *shard*, and wait until the other one has forgotten it."""
        command = {"moveChunk": name, "find": find, "to": shard, "_waitForDelete": True}
        _until(lambda: self.client.admin.command(command)["ok"] == 1)

    def _defaults(self) -> dict[str, str]:
        return {}

    def _is_ready(self) -> bool:
        with (
            suppress(PyMongoError),
            pymongo.MongoClient[dict[str, Any]](self.dsn, serverSelectionTimeoutMS=2000) as client,
        ):
            return bool(client.admin.command("hello")["msg"] == "isdbgrid")
        return False


def _until(done: Callable[[], bool], seconds: float = 60) -> None:
    """Try until it is done: a chunk may be busy for a moment."""
    end = time.monotonic() + seconds
    while True:
        try:
            if done():
                return
        except PyMongoError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)
