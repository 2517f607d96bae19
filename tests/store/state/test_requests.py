"""Requests to the owner of a store: done once, answered with what was done, and kept while no owner runs."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.servers.s3 import s3_server

from headwater.errors import HeadwaterError, InputError, TransientError
from headwater.state import Catalog, WriteBatch, open_reader
from headwater.state.board import open_board
from headwater.state.errors import NoAnswer, RequestFailed
from headwater.state.query_store import QueryReader, QueryStore, open_query_store
from headwater.state.requests import INBOX, Answers, Inbox, Request, ask, leave

pytestmark = pytest.mark.store

OWNER = "owner"


class Owner:
    """What writes the store at *location*, and does what is asked."""

    def __init__(self, location: str, store: QueryStore) -> None:
        self._store = store
        self._batch = WriteBatch()
        self.answers = Answers(store.catalog, store, self._batch)
        self.inbox = Inbox(location)
        self.done: list[dict[str, Any]] = []

    def serve(self, target: str = "", error: HeadwaterError | None = None) -> None:
        for request in self.inbox.open(self.answers, target, now=True):
            self.done.append(request.detail)
            self.answers.put(self._batch, request.id, error, {"done": len(self.done)})

    def seal(self) -> None:
        batch, self._batch = self._batch, WriteBatch()
        self._store.seal(batch)


@contextmanager
def owning(location: str) -> Iterator[Owner]:
    with open_query_store(location, OWNER, takeover=True) as store:
        yield Owner(location, store)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as url:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield url


@pytest.fixture(params=["memory", "embedded", "slatedb+s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return f"memory://{uuid.uuid4()}"
        case "embedded":
            return str(tmp_path / "store")
    return f"slatedb+s3://lake/{uuid.uuid4()}?endpoint={request.getfixturevalue('bucket')}&region=us-east-1"


@contextmanager
def asking(location: str, request: Request, seconds: float = 20.0) -> Iterator[list[object]]:
    """Ask meanwhile; what came of it is in the list when it is over."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(ask(location, request, lambda: QueryReader(location, OWNER), seconds, "owner"))
        except HeadwaterError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(seconds + 10)
    assert not thread.is_alive()


def wait_for_one(location: str) -> None:
    end = time.monotonic() + 10
    while not open_board(location).list(INBOX):
        assert time.monotonic() < end


def test_a_request_is_done_once_and_its_answer_comes_with_the_seal(location: str) -> None:
    with owning(location) as owner:
        with asking(location, Request("count", {"n": 1})) as found:
            wait_for_one(location)
            owner.serve()
            owner.serve()
            assert found == []  # nothing is sealed yet
            owner.seal()
            owner.serve()
        assert found == [{"done": 1}]
        assert owner.done == [{"n": 1}]
        assert not open_board(location).list(INBOX)


def test_what_cannot_be_done_is_the_answer(location: str) -> None:
    with owning(location) as owner:
        with asking(location, Request("count", {})) as found:
            wait_for_one(location)
            owner.serve(error=InputError("It is Sunday.", next_step="Ask again."))
            owner.seal()
            owner.serve()
        (error,) = found
        assert isinstance(error, RequestFailed)
        assert (error.message, error.next_step) == ("It is Sunday.", "Ask again.")


def test_a_request_waits_for_an_owner(location: str) -> None:
    request = Request("count", {"n": 1})
    with asking(location, request, 0.01) as found:
        pass
    assert isinstance(found[0], NoAnswer)
    assert isinstance(found[0], TransientError)
    assert "is queued" in str(found[0])
    with owning(location) as owner:
        owner.serve()  # its seal never comes
    with owning(location) as owner:
        owner.serve()
        owner.seal()
        assert owner.done == [{"n": 1}]
    with owning(location) as owner:
        owner.serve()
        assert owner.done == []
    assert not leave_again(location, request)


def leave_again(location: str, request: Request) -> list[dict[str, Any]]:
    """What an owner does when the same request comes once more."""
    assert leave(location, request)
    with owning(location) as owner:
        owner.serve()
        return owner.done


def test_what_nobody_waits_for_is_not_done_later(location: str) -> None:
    with asking(location, Request("count", {}, seconds=0.01), 0.01) as found:
        pass
    assert isinstance(found[0], NoAnswer)
    assert not open_board(location).list(INBOX)
    leave(location, Request("count", {}, seconds=0.01))  # of one that was killed while it waited
    with owning(location) as owner:
        owner.inbox.open(owner.answers, "another", now=True)
        end = time.monotonic() + 0.01
        while time.monotonic() < end:
            pass
        owner.serve()
        assert owner.done == []
    assert not open_board(location).list(INBOX)


def test_the_clocks_of_other_hosts_do_not_count(tmp_path: Path) -> None:
    leave(str(tmp_path), Request("count", {"n": 1}, seconds=60, id=f"{1:032x}", asked_us=1))
    with owning(str(tmp_path)) as owner:
        owner.serve()
        assert owner.done == [{"n": 1}]


def test_what_was_taken_back_is_not_done(tmp_path: Path) -> None:
    request = Request("count", {}, seconds=60)
    with owning(str(tmp_path)) as owner:
        leave(str(tmp_path), request)
        owner.inbox.open(owner.answers, "another", now=True)
        open_board(str(tmp_path)).remove(request.name)
        owner.serve()
        assert owner.done == []


def test_each_query_sees_its_own_requests_the_oldest_first(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        leave(str(tmp_path), Request("count", {"n": number}, target="orders", asked_us=number))
    leave(str(tmp_path), Request("count", {"n": 9}, target="items"))
    with owning(str(tmp_path)) as owner:
        owner.serve("orders")
        assert owner.done == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_many_queries_of_a_process_look_once_for_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    with owning(str(tmp_path)) as owner:
        board = owner.inbox._board
        listing = board.list

        def counted(folder: str) -> dict[str, str]:
            looks.append(folder)
            return listing(folder)

        monkeypatch.setattr(board, "list", counted)
        end = time.monotonic() + 3 * board.poll_seconds
        turns = 0
        while time.monotonic() < end:
            for query in range(50):
                assert owner.inbox.open(owner.answers, f"query {query}") == []
            turns += 1
        assert turns > 10
        assert len(looks) <= 4


def test_what_is_no_request_is_removed(tmp_path: Path) -> None:
    for number, text in enumerate((b"", b"[]", b"{}", b'{"kind": "count", "detail": {}, "colour": "red"}')):
        open_board(str(tmp_path)).create(f"{INBOX}/{number}", text)
    with owning(str(tmp_path)) as owner:
        owner.serve()
        assert owner.done == []
    assert not open_board(str(tmp_path)).list(INBOX)


def test_answers_are_in_the_state_of_the_one_that_was_asked(tmp_path: Path) -> None:
    with owning(str(tmp_path)) as owner:
        leave(str(tmp_path), Request("count", {}))
        owner.serve()
        owner.seal()
    with open_reader(tmp_path) as reader, reader.snapshot() as view:
        assert view.epoch
    with QueryReader(str(tmp_path), OWNER) as section, section.snapshot() as own:
        assert Catalog.load(own).names() == ["answers"]
