"""Requests to the owner of a store: done once, answered with what was done, kept while no owner runs, or withdrawn."""

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

from headwater import failpoints
from headwater.control.command import AddTables, Command, NoteEvent
from headwater.control.errors import NoAnswer, NoSuchRequest, RequestBegun, RequestFailed
from headwater.control.request import AFTER_CLAIM, CLAIMS, INBOX, Answers, Inbox, Request, ask, leave, queued, withdraw
from headwater.errors import HeadwaterError, InputError, TransientError
from headwater.state import Catalog, WriteBatch, open_reader
from headwater.state.board import open_board
from headwater.state.query_store import QueryReader, QueryStore, open_query_store

pytestmark = pytest.mark.store

OWNER = "owner"


def note(number: int = 1, **fields: Any) -> Request:
    return Request(NoteEvent("orders", str(number)), **fields)


def numbers(done: list[Command]) -> list[str]:
    return [command.text for command in done if isinstance(command, NoteEvent)]


class Owner:
    """What writes the store at *location*, and does what is asked."""

    def __init__(self, location: str, store: QueryStore) -> None:
        self._store = store
        self._batch = WriteBatch()
        self.answers = Answers(store.catalog, store, self._batch)
        self.inbox = Inbox(location)
        self.done: list[Command] = []

    def serve(self, target: str = "", error: HeadwaterError | None = None) -> None:
        for request in self.inbox.open(self.answers, target, now=True):
            self.done.append(request.command)
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
        with asking(location, note()) as found:
            wait_for_one(location)
            owner.serve()
            owner.serve()
            assert found == []  # nothing is sealed yet
            owner.seal()
            owner.serve()
        assert found == [{"done": 1}]
        assert numbers(owner.done) == ["1"]
        assert not open_board(location).list(INBOX)


def test_the_owner_knows_what_it_has_answered_and_who_asked(tmp_path: Path) -> None:
    location = str(tmp_path)
    with owning(location) as owner:
        leave(location, note(1, asked_by="ada@host"))
        owner.serve()
        owner.seal()
        assert owner.inbox.take_served() == []  # its request is still there
        leave(location, note(2, asked_by="bob@host"))
        owner.serve(error=InputError("It is Sunday."))
        owner.seal()
        owner.serve()
        first, second = [served.to_json(sink="delta") for served in owner.inbox.take_served()]
        assert first["asked_by"] == "ada@host"
        assert first["name"] == "note_event"
        assert first["detail"] == {"sink": "delta", "log": "orders", "text": "1"}
        assert "problem" not in first
        assert second["problem"] == "It is Sunday."
        assert owner.inbox.take_served() == []


def test_what_cannot_be_done_is_the_answer(location: str) -> None:
    with owning(location) as owner:
        with asking(location, note()) as found:
            wait_for_one(location)
            owner.serve(error=InputError("It is Sunday.", next_step="Ask again."))
            owner.seal()
            owner.serve()
        (error,) = found
        assert isinstance(error, RequestFailed)
        assert (error.message, error.next_step) == ("It is Sunday.", "Ask again.")


def test_a_request_waits_for_an_owner(location: str) -> None:
    request = note()
    with asking(location, request, 0.01) as found:
        pass
    assert isinstance(found[0], NoAnswer)
    assert isinstance(found[0], TransientError)
    assert f"headwater requests --store {location} --withdraw {request.id}" in str(found[0]).replace("'", "")
    with owning(location) as owner:
        owner.serve()  # its seal never comes
    with owning(location) as owner:
        owner.serve()
        owner.seal()
        assert numbers(owner.done) == ["1"]
    with owning(location) as owner:
        owner.serve()
        assert owner.done == []
    assert not leave_again(location, request)


def leave_again(location: str, request: Request) -> list[Command]:
    """What an owner does when the same request comes once more."""
    assert leave(location, request)
    with owning(location) as owner:
        owner.serve()
        return owner.done


def test_a_withdrawn_request_is_never_done(location: str) -> None:
    first, second = note(1), note(2)
    for request in (first, second):
        leave(location, request)
    assert [request.id for request in queued(location)] == [first.id, second.id]
    with owning(location) as owner:
        owner.inbox.open(owner.answers, "another", now=True)  # it was seen, and is not begun
        withdraw(location, first.id)
        owner.serve()
        owner.seal()
        owner.serve()
        assert numbers(owner.done) == ["2"]
    assert not open_board(location).list(INBOX)
    assert not open_board(location).list(CLAIMS)
    for request in (first, second):
        with pytest.raises(NoSuchRequest, match="answered or withdrawn"):
            withdraw(location, request.id)


def test_a_request_that_was_begun_cannot_be_withdrawn(location: str) -> None:
    request = note()
    leave(location, request)
    with owning(location) as owner:
        owner.serve()  # its seal never comes
    with pytest.raises(RequestBegun):
        withdraw(location, request.id)
    with owning(location) as owner:
        owner.serve()
        owner.seal()
        assert numbers(owner.done) == ["1"]


class Crash(BaseException):
    """The process is gone."""


def test_what_is_withdrawn_by_a_process_that_dies_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = note()
    leave(str(tmp_path), request)

    def crash(point: str) -> None:
        if point == AFTER_CLAIM:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", crash)
        with pytest.raises(Crash):
            withdraw(str(tmp_path), request.id)
    withdraw(str(tmp_path), request.id)  # by another one
    leave(str(tmp_path), note(2, id=request.id))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", crash)
        with pytest.raises(Crash):
            withdraw(str(tmp_path), request.id)
    with owning(str(tmp_path)) as owner:
        owner.serve()
        assert owner.done == []
        assert queued(str(tmp_path))  # as long as the other process can be alive
        owner.inbox = Inbox(str(tmp_path), withdraw_seconds=0.0)
        owner.serve()
        assert owner.done == []
    assert not open_board(str(tmp_path)).list(INBOX)
    assert not open_board(str(tmp_path)).list(CLAIMS)


def test_one_of_the_owner_and_the_one_that_withdraws_has_a_request(location: str) -> None:
    for number in range(10):
        request = note(number)
        leave(location, request)
        withdrawn: list[bool] = []

        def take_back(taken: str = request.id, outcome: list[bool] = withdrawn) -> None:
            try:
                withdraw(location, taken)
                outcome.append(True)
            except (RequestBegun, NoSuchRequest):
                outcome.append(False)

        with owning(location) as owner:
            thread = threading.Thread(target=take_back)
            thread.start()
            owner.serve()
            owner.seal()
            thread.join()
            owner.serve()
            assert numbers(owner.done) == ([] if withdrawn == [True] else [str(number)])
    assert not open_board(location).list(INBOX)
    assert not open_board(location).list(CLAIMS)


def test_a_wait_that_is_interrupted_withdraws_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwater.control.request.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(str(tmp_path), note(), lambda: QueryReader(str(tmp_path), OWNER), 10, "owner")
    assert queued(str(tmp_path)) == []


def test_a_request_says_who_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    leave(str(tmp_path), Request(AddTables(("a", "b"))))
    (request,) = queued(str(tmp_path))
    assert request.asked_by.startswith("ada@")
    assert request.command == AddTables(("a", "b"))


def test_the_claim_of_a_process_that_died_after_the_answer_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(str(tmp_path), note())
    board = open_board(str(tmp_path))
    with owning(str(tmp_path)) as owner:
        owner.serve()
        owner.seal()
    for name in board.list(INBOX):
        board.remove(name)
    assert board.list(CLAIMS)
    with owning(str(tmp_path)) as owner:
        owner.serve()
    assert not board.list(CLAIMS)


def test_the_clocks_of_other_hosts_do_not_count(tmp_path: Path) -> None:
    leave(str(tmp_path), note(id=f"{1:032x}", asked_us=1))
    with owning(str(tmp_path)) as owner:
        owner.serve()
        assert numbers(owner.done) == ["1"]


def test_each_query_sees_its_own_requests_the_oldest_first(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        leave(str(tmp_path), note(number, target="orders", asked_us=number))
    leave(str(tmp_path), note(9, target="items"))
    with owning(str(tmp_path)) as owner:
        owner.serve("orders")
        assert numbers(owner.done) == ["1", "2", "3"]


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
        assert looks.count(INBOX) <= 4
        assert looks.count(CLAIMS) == 1  # at its start


def test_what_is_no_request_is_removed(tmp_path: Path) -> None:
    for number, text in enumerate(
        (b"", b"[]", b"{}", b'{"command": {"type": "paint"}}', b'{"command": {"type": "drop_sink"}, "id": "1"}')
    ):
        open_board(str(tmp_path)).create(f"{INBOX}/{number}", text)
    with owning(str(tmp_path)) as owner:
        owner.serve()
        assert owner.done == []
    assert not open_board(str(tmp_path)).list(INBOX)


def test_answers_are_in_the_state_of_the_one_that_was_asked(tmp_path: Path) -> None:
    with owning(str(tmp_path)) as owner:
        leave(str(tmp_path), note())
        owner.serve()
        owner.seal()
    with open_reader(tmp_path) as reader, reader.snapshot() as view:
        assert view.epoch
    with QueryReader(str(tmp_path), OWNER) as section, section.snapshot() as own:
        assert Catalog.load(own).names() == ["answers"]
