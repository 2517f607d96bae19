"""Requests to the process that owns a store, from any other: capture, query, pipeline.

A request is a record in the inbox of the store's board. The owner looks there now and then, does what is asked, and
seals its answer with what it did; then it removes the request. One that is answered is never done again, whoever the
owner is by then; one that is not is done after a crash. What a pipeline does for a sink takes several seals, the last
of which has the answer: that is done at least once, and doing it again must change nothing
(:mod:`headwater.pipeline.sink_control`).
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol

from headwater import failpoints
from headwater.errors import HeadwaterError, TransientError
from headwater.state.batch import WriteBatch
from headwater.state.board import open_board
from headwater.state.catalog import Catalog
from headwater.state.errors import NoAnswer, RequestFailed, StoreNotFound
from headwater.state.store import Snapshot
from headwater.state.table import StateTable
from headwater.state.types import Field, FieldType, TableSchema

ANSWERS = TableSchema(
    "answers",
    1,
    key=(Field("id", FieldType.TEXT),),
    value=(Field("error", FieldType.TEXT), Field("next_step", FieldType.TEXT), Field("result", FieldType.JSON)),
)
INBOX: Final = "inbox"

BEFORE_REMOVE = failpoints.register("requests.before_remove")
"""The answer is sealed, and the request still there."""

_LOOK_SECONDS: Final = 0.1
_KEPT_SECONDS: Final = 24 * 60 * 60


def _time_prefix(seconds: float) -> str:
    """The first half of the id of a request of that time, in seconds since 1970."""
    return f"{int(seconds * 1_000_000):016x}"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.

    :ivar target: which of the owner's queries; empty: the owner itself.
    :ivar seconds: how long the asker waits; then it removes the request. ``None``: it stays until it is done.
    :ivar id: begins with the time, unless it is given.
    """

    kind: str
    detail: dict[str, Any]
    target: str = ""
    seconds: float | None = None
    id: str = field(default_factory=lambda: _time_prefix(time.time()) + uuid.uuid4().hex[:16])
    asked_us: int = field(default_factory=lambda: time.time_ns() // 1000)

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{INBOX}/{self.id}"


class Inbox:
    """The requests to the owner of the store at *location*; its queries in a process share one (:func:`inbox_of`)."""

    def __init__(self, location: str) -> None:
        self._board = open_board(location)
        self._requests: dict[str, Request] = {}
        self._first_seen: dict[str, float] = {}
        self._looked = -1e9
        self._looking = threading.Lock()
        self._shown: dict[str, float] = {}

    def open(self, answers: Answers, target: str = "", *, now: bool = False) -> list[Request]:
        """The requests to *target* that are not answered, oldest first; those whose answer is sealed are removed.

        The board is looked at every ``poll_seconds``, by one thread at a time. In between there are none.

        :param now: look at once. :raises StateError: the board cannot be read.
        """
        if (now or time.monotonic() - self._looked >= self._board.poll_seconds) and self._looking.acquire(now):
            try:
                self._look()
            finally:
                self._looking.release()
        if not now and self._shown.get(target) == self._looked:
            return []
        self._shown[target] = self._looked
        asked = [request for request in self._requests.values() if request.target == target]
        found = []
        for request in sorted(asked, key=lambda one: one.asked_us):
            if answers.is_sealed(request.id) or not self._is_awaited(request):
                self.remove(request)
            elif request.id not in answers:
                found.append(request)
        return found

    def remove(self, request: Request) -> None:
        """Remove a request whose answer is sealed."""
        failpoints.hit(BEFORE_REMOVE)
        with suppress(TransientError):  # it is tried again with the next look
            self._board.remove(request.name)
        self._requests = {name: one for name, one in self._requests.items() if one is not request}

    def _look(self) -> None:
        self._looked = time.monotonic()
        names = self._board.list(INBOX)
        known = {name: request for name, request in self._requests.items() if name in names}
        for name in names.keys() - known.keys():
            record = self._board.read(name)
            if record is None:
                continue
            try:
                known[name] = Request(**json.loads(record.data or b""))
            except (ValueError, TypeError):
                self._board.remove(name)
        self._first_seen = {name: self._first_seen.get(name, self._looked) for name in known}
        self._requests = known

    def _is_awaited(self, request: Request) -> bool:
        """Whether the asker can still wait for it. The clock of its host counts for nothing.

        An asker that was killed does not remove its request: then the time since this process saw it first decides.
        """
        if request.seconds is None:
            return True
        waited = time.monotonic() - self._first_seen.get(request.name, -1e9)  # another thread saw that it was removed
        return waited < request.seconds and self._board.read(request.name) is not None


@lru_cache(maxsize=64)
def _inbox(location: str, process: int) -> Inbox:
    return Inbox(location)


def inbox_of(location: str) -> Inbox:
    """The inbox of the store at *location* in this process."""
    return _inbox(location, os.getpid())


class Answering(Protocol):
    """The state of the one that is asked."""

    def snapshot(self) -> Snapshot: ...


class Answers:
    """The answers in *store*, sealed with what was done."""

    def __init__(self, catalog: Catalog, store: Answering, batch: WriteBatch) -> None:
        self._table: StateTable = catalog.open_or_create(ANSWERS, batch)
        self._store = store
        self._given: set[str] = set()

    def __contains__(self, request: str) -> bool:
        """Whether it is answered, perhaps with the next seal."""
        return request in self._given or self.is_sealed(request)

    def is_sealed(self, request: str) -> bool:
        with self._store.snapshot() as view:
            return self._table.get(view, 0, (request,)) is not None

    def put(
        self, batch: WriteBatch, request: str, error: HeadwaterError | None, result: dict[str, Any] | None = None
    ) -> None:
        """Answer *request* with the seal of *batch*."""
        self._given.add(request)
        problem = ("", "") if error is None else (error.message, error.next_step or "")
        self._table.put(batch, 0, (request,), (*problem, result or {}))

    def forget_old(self, batch: WriteBatch) -> None:
        """Forget the answers to requests of more than a day ago, none of which is on the board any more."""
        self._table.delete_range(batch, 0, (_time_prefix(0),), (_time_prefix(time.time() - _KEPT_SECONDS),))


def leave(location: str, request: Request) -> bool:
    """Write *request* down for the owner of the store at *location*; whether it is new. Nobody waits for the answer."""
    return open_board(location).create(request.name, json.dumps(asdict(request)).encode())


def ask(
    location: str,
    request: Request,
    open_state: Callable[[], AbstractContextManager[Answering]],
    seconds: float,
    whose: str,
) -> dict[str, Any]:
    """Ask the owner of the store at *location*, and wait for the answer; the result.

    :param open_state: opens what has its answers, to read. :param whose: name of the one that is asked, for errors.
    :raises RequestFailed: what it answered. :raises NoAnswer: none in time. Unless the request has ``seconds``, it is
        done when the owner runs again.
    """
    board = open_board(location)
    end = time.monotonic() + seconds
    leave(location, request)
    try:
        while board.read(request.name) is not None and time.monotonic() < end:
            time.sleep(max(_LOOK_SECONDS, board.poll_seconds / 4))
    finally:
        if request.seconds is not None:
            board.remove(request.name)
    answer = _answer(request, open_state)
    if answer is None:
        step = "Look whether it runs: headwater status" + (
            "" if request.seconds is not None else ". The request is queued, and is done when it runs."
        )
        raise NoAnswer(f"The {whose} did not answer within {seconds:g} s.", next_step=step)
    error, next_step, result = answer
    if error:
        raise RequestFailed(error, next_step=next_step or None)
    return dict(result)


def _answer(request: Request, open_state: Callable[[], AbstractContextManager[Answering]]) -> Any:
    try:
        with open_state() as state, state.snapshot() as view:
            catalog = Catalog.load(view)
            return catalog.open(ANSWERS).get(view, 0, (request.id,)) if ANSWERS.name in catalog.names() else None
    except StoreNotFound:
        return None
