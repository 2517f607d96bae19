"""Writers to a double of a Citus cluster: each row on the node that has its shard."""

from __future__ import annotations

import random
import threading
from typing import Any, Self

import psycopg
from tests.servers.citus_double import CitusDouble


def fill(double: CitusDouble, name: str, rows: int, first: int = 0) -> None:
    """*rows* rows of a distributed table: the shards of each node take those that are theirs."""
    for group in set(double.tables[name].shards.values()):
        double.execute(
            group,
            f"INSERT INTO {name} SELECT i, 'v' || i, i FROM generate_series({first}, {first + rows - 1}::bigint) i"
            f" WHERE {here(double, name, group)}",
        )


def here(double: CitusDouble, name: str, group: int) -> str:
    """The condition on ``i`` that a row belongs to a shard of the node."""
    table = double.tables[name]
    oid = double.execute(group, f"SELECT '{name}'::regclass::oid")[0][0]
    tests = [
        f"satisfies_hash_partition({oid}::oid, {modulus}, {remainder}, i::bigint)"
        for shard, (modulus, remainder) in table.bounds.items()
        if table.shards[shard] == group
    ]
    return "(" + " OR ".join(tests or ["false"]) + ")"


class Writer(threading.Thread):
    """Inserts, updates and deletes rows on all nodes until it is ended; waits while shards move.

    :ivar may_write: held while a statement is under way.
    """

    def __init__(self, double: CitusDouble, name: str, seed: int = 1, keys: int = 3000) -> None:
        super().__init__(daemon=True)
        self._double, self._name, self._keys = double, name, keys
        self._random = random.Random(seed)
        self._end = threading.Event()
        self._sessions: dict[int, psycopg.Connection[tuple[Any, ...]]] = {}
        self._owners: dict[int, int] = {}
        self.may_write = threading.Lock()
        self.writes = 0
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self) -> None:
        try:
            while not self._end.is_set():
                with self.may_write:
                    self._write()
        except BaseException as error:
            self.failure = error

    def forget_owners(self) -> None:
        """Shards have moved."""
        self._owners.clear()

    def _owner(self, key: int) -> int:
        if key not in self._owners:
            self._owners[key] = self._double.owner(self._name, key)
        return self._owners[key]

    def _write(self) -> None:
        key = self._random.randrange(self._keys)
        group = -1
        try:
            group = self._owner(key)
            session = self._sessions.get(group)
            if session is None or session.closed:
                session = self._sessions[group] = self._double.connect(group)
            chance = self._random.random()
            if chance < 0.2:
                session.execute(f"DELETE FROM {self._name} WHERE id = %s".encode(), [key])
            else:
                session.execute(
                    f"INSERT INTO {self._name} VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v,"
                    " amount = excluded.amount".encode(),
                    [key, f"w{self.writes}", self.writes],
                )
            self.writes += 1
        except psycopg.OperationalError:  # the node was killed
            if group in self._sessions:
                self._sessions.pop(group).close()
            self._end.wait(0.05)

    def end(self) -> None:
        self._end.set()
        self.join(60)
        for session in self._sessions.values():
            session.close()
        if self.failure is not None:
            raise self.failure
