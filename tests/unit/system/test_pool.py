"""Connections are used again, unless they broke, rested for too long, or belong to the parent process."""

from __future__ import annotations

import os
import threading

import pytest

from headwater.errors import TransientError
from headwater.system import pool as module
from headwater.system.pool import MOST_IDLE, Pool
from headwater.system.retry import Retries

pytestmark = pytest.mark.unit


class Broken(TransientError):
    """An error that passes."""


class Connection:
    """Counts how often it was reset."""

    def __init__(self) -> None:
        self.resets, self.is_alive, self.is_closed = 0, True, False

    def reset(self) -> bool:
        self.resets += 1
        return self.is_alive

    def close(self) -> None:
        self.is_closed = True


def pool(**options: float) -> Pool[Connection]:
    return Pool(Connection.reset, Connection.close, **options)


def test_a_connection_is_used_again_by_the_next_one_with_its_address() -> None:
    connections = pool()
    first = connections.borrow("a", Connection)
    assert connections.borrow("a", Connection) is not first
    connections.give_back("a", first)
    assert connections.borrow("b", Connection) is not first
    assert connections.borrow("a", Connection) is first
    assert first.resets == 2, "ended by the one that had it, and looked at before the next one has it"


def test_one_that_died_is_closed_and_replaced() -> None:
    connections = pool()
    died, idle = Connection(), Connection()
    died.is_alive = False
    connections.give_back("a", died)
    assert died.is_closed
    connections.give_back("a", idle)
    idle.is_alive = False
    assert connections.borrow("a", Connection) is not idle
    assert idle.is_closed


def test_one_that_rested_a_moment_is_not_asked_and_one_that_rested_too_long_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    connections, connection = pool(rest_seconds=5, idle_seconds=20), Connection()
    connections.give_back("a", connection)
    now[0] += 4
    assert connections.borrow("a", Connection) is connection
    assert connection.resets == 0
    connections.give_back("a", connection)
    now[0] += 6
    assert connections.borrow("a", Connection) is connection
    assert connection.resets == 1
    connections.give_back("a", connection)
    now[0] += 21
    assert connections.borrow("a", Connection) is not connection
    assert connection.is_closed


def test_an_error_closes_the_connection() -> None:
    connections = pool()
    with pytest.raises(ValueError, match="no"), connections.borrowed("a", Connection) as connection:
        raise ValueError("no")
    assert connection.is_closed
    assert connections.borrow("a", Connection) is not connection


def test_a_question_is_asked_again_over_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Retries", lambda: Retries(sleep=lambda _: None))
    connections, asked = pool(), list[Connection]()

    def question(connection: Connection) -> int:
        asked.append(connection)
        if len(asked) < 3:
            raise Broken("the connection broke")
        return 7

    assert connections.ask("a", Connection, question) == 7
    assert len({id(connection) for connection in asked}) == 3
    assert [connection.is_closed for connection in asked] == [True, True, False]


def test_only_a_few_stay_idle_and_they_end_with_the_pool() -> None:
    connections = pool()
    held = [connections.borrow("a", Connection) for _ in range(MOST_IDLE + 1)]
    for connection in held:
        connections.give_back("a", connection)
    assert [connection.is_closed for connection in held] == [False] * MOST_IDLE + [True]
    connections.close()
    assert all(connection.is_closed for connection in held)


def test_a_forked_process_and_other_threads_never_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    connections, connection = pool(), Connection()
    connections.give_back("a", connection)
    with monkeypatch.context() as child:
        child.setattr("os.getpid", os.getppid)
        assert connections.borrow("a", Connection) is not connection
    taken: list[Connection] = []
    threads = [threading.Thread(target=lambda: taken.append(connections.borrow("a", Connection))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in taken}) == 4
    assert connection in taken
