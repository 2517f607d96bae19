"""Requests to the process that owns a store, from any other: capture, query, pipeline.

============================  ==================================================================================
record on the store's board
============================  ==================================================================================
``inbox/<id>``                the request, from :func:`leave` until its answer is sealed
``claims/<id>``               who has it, put if absent: the owner that begins with it, or the one that withdraws it
============================  ==================================================================================

The owner looks at the inbox now and then, claims a request, does it, and seals its answer with what it did; then it
removes the request. A request that is answered is never done again, whichever process is the owner then; one that is
not is done after a crash. While no owner runs it stays, and is done when one starts, unless it is withdrawn before.

What a pipeline does for a sink takes several seals, the last of which has the answer: that is done at least once, and
doing it again must change nothing (:mod:`headwater.pipeline.sink_control`).
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shlex
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

from headwater import failpoints
from headwater.control.command import (
    CaptureCommand,
    Command,
    NoteEvent,
    QueryCommand,
    command_from_json,
    command_to_json,
)
from headwater.control.errors import NoAnswer, NoSuchRequest, RequestBegun, RequestFailed
from headwater.errors import HeadwaterError, TransientError
from headwater.state import open_reader
from headwater.state.batch import WriteBatch
from headwater.state.board import Board, open_board
from headwater.state.catalog import Catalog
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader
from headwater.state.store import Snapshot
from headwater.state.table import StateTable
from headwater.state.types import Field, FieldType, TableSchema
from headwater.system.process import host_name

ANSWERS = TableSchema(
    "answers",
    1,
    key=(Field("id", FieldType.TEXT),),
    value=(Field("error", FieldType.TEXT), Field("next_step", FieldType.TEXT), Field("result", FieldType.JSON)),
)
INBOX: Final = "inbox"
CLAIMS: Final = "claims"

AFTER_CLAIM = failpoints.register("requests.after_claim")
"""A request is claimed, by its owner or to withdraw it, and nothing else was done."""
BEFORE_REMOVE = failpoints.register("requests.before_remove")
"""The answer is sealed, and the request still there."""

_OWNER, _WITHDRAWN = b"owner", b"withdrawn"
_LOOK_SECONDS: Final = 0.1
_KEPT_SECONDS: Final = 24 * 60 * 60
_MOST_SERVED: Final = 1000


def _time_prefix(seconds: float) -> str:
    """The first half of the id of a request of that time, in seconds since 1970."""
    return f"{int(seconds * 1_000_000):016x}"


def user_name() -> str:
    """The user and the host of this process, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user can have no name
        user = str(os.getuid())
    return f"{user}@{host_name()}"


@dataclass(frozen=True, slots=True)
class Request:
    """One command to the owner of a store.

    :ivar target: which of the owner's queries; empty: the owner itself.
    :ivar asked_by: ``user@host``. :ivar id: begins with the time, unless it is given.
    """

    command: Command
    target: str = ""
    asked_by: str = field(default_factory=user_name)
    id: str = field(default_factory=lambda: _time_prefix(time.time()) + uuid.uuid4().hex[:16])
    asked_us: int = field(default_factory=lambda: time.time_ns() // 1000)

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{INBOX}/{self.id}"

    def to_json(self) -> dict[str, Any]:
        """The record."""
        return {
            "command": command_to_json(self.command),
            "target": self.target,
            "asked_by": self.asked_by,
            "id": self.id,
            "asked_us": self.asked_us,
        }

    @classmethod
    def parse(cls, data: bytes) -> Request:
        """Read a record. :raises ValueError: it is no request."""
        try:
            value = json.loads(data)
            return cls(**{**value, "command": command_from_json(value["command"])})
        except (KeyError, TypeError):
            raise ValueError("it is no request") from None


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered. :ivar problem: why it could not be done; empty: it was done."""

    request: Request
    problem: str

    def to_json(self, **detail: Any) -> dict[str, Any]:
        """For the journal. :param detail: what else is known of the command."""
        fields = command_to_json(self.request.command)
        entry = {"name": fields.pop("type"), "asked_by": self.request.asked_by, "detail": detail | fields}
        return entry | ({"problem": self.problem} if self.problem else {})


class Inbox:
    """The requests to the owner of the store at *location*; its queries in a process share one (:func:`inbox_of`).

    :param withdraw_seconds: how long the process that withdraws a request can take to remove it.
    """

    def __init__(self, location: str, withdraw_seconds: float = 10.0) -> None:
        self._board, self._withdraw_seconds = open_board(location), withdraw_seconds
        self._requests: dict[str, Request] = {}
        self._claimed: set[str] = set()
        self._withdrawn: dict[str, float] = {}
        self._looked = -1e9
        self._looking = threading.Lock()
        self._shown: dict[str, float] = {}
        self._served: deque[Served] = deque(maxlen=_MOST_SERVED)

    def open(
        self, answers: Answers, target: str = "", *, now: bool = False, only: type[Command] | None = None
    ) -> list[Request]:
        """The requests to *target* that are not answered, oldest first; they cannot be withdrawn any more.

        Those whose answer is sealed are removed. The board is looked at every ``poll_seconds``, by one thread at a
        time; in between there are none.

        :param now: look at once. :param only: leave all other commands alone.
        :raises StateError: the board cannot be read.
        """
        if (now or time.monotonic() - self._looked >= self._board.poll_seconds) and self._looking.acquire(now):
            try:
                self._look()
            finally:
                self._looking.release()
        if not now and self._shown.get(target) == self._looked:
            return []
        self._shown[target] = self._looked
        queued = [request for request in self._requests.values() if request.target == target]
        unanswered = []
        for request in sorted(queued, key=lambda request: request.asked_us):
            if only is not None and not isinstance(request.command, only):
                continue
            if answers.is_sealed(request.id):
                self.finish(request, answers)
            elif request.id not in answers and self._claim(request):
                unanswered.append(request)
        return unanswered

    def finish(self, request: Request, answers: Answers) -> None:
        """Remove a request whose answer is sealed; :meth:`take_served` has it then. Once: any thread can call it."""
        failpoints.hit(BEFORE_REMOVE)
        with self._looking:  # else a look that has listed it before would bring it back
            if request.name not in self._requests:
                return
            with suppress(TransientError):  # it is tried again with the next look
                _remove(self._board, request.id)
                self._served.append(Served(request, answers.problem(request.id)))
            self._forget(request)

    def take_served(self) -> list[Served]:
        """The requests that were answered since the last call, to any target. Any thread."""
        taken = []
        while self._served:
            taken.append(self._served.popleft())
        return taken

    def _forget(self, request: Request) -> None:
        self._requests = {name: other for name, other in self._requests.items() if other is not request}
        self._claimed.discard(request.id)

    def _look(self) -> None:
        is_first = self._looked < 0
        self._looked = time.monotonic()
        names = self._board.list(INBOX)
        known = {name: request for name, request in self._requests.items() if name in names}
        for name in names.keys() - known.keys():
            record = self._board.read(name)
            if record is None:
                continue
            try:
                known[name] = Request.parse(record.data or b"")
            except ValueError:
                self._board.remove(name)
        self._requests = known
        queued_ids = {request.id for request in known.values()}
        self._withdrawn = {request: seen for request, seen in self._withdrawn.items() if request in queued_ids}
        if is_first:
            self._remove_stale_claims()

    def _remove_stale_claims(self) -> None:
        """Remove the claims that a process left which died while it removed a request."""
        for claim in self._board.list(CLAIMS):
            request = claim.rpartition("/")[2]
            if self._board.read(f"{INBOX}/{request}") is None:
                self._board.remove(claim)

    def _claim(self, request: Request) -> bool:
        """Whether *request* is ours to do; ``False``: it was withdrawn."""
        if request.id in self._claimed:
            return True
        claim = _claim(self._board, request.id, _OWNER)
        if claim == _OWNER:
            self._claimed.add(request.id)
            return True
        now = time.monotonic()
        if claim == _WITHDRAWN and now - self._withdrawn.setdefault(request.id, now) >= self._withdraw_seconds:
            _remove(self._board, request.id)  # the process that withdrew it has died before it did that
        return False


def _claim(board: Board, request: str, mine: bytes) -> bytes:
    """Claim *request*; who has it then; empty: it is not queued any more."""
    name = f"{CLAIMS}/{request}"
    if not board.create(name, mine):
        record = board.read(name)
        return b"" if record is None else record.data or b""
    failpoints.hit(AFTER_CLAIM)
    if board.read(f"{INBOX}/{request}") is None:  # removed between a look at it and the claim
        board.remove(name)
        return b""
    return mine


def _remove(board: Board, request: str) -> None:
    """The claim last: a claim without a request is garbage, a request without a claim can be done."""
    board.remove(f"{INBOX}/{request}")
    board.remove(f"{CLAIMS}/{request}")


@lru_cache(maxsize=64)
def _inbox(location: str, process: int) -> Inbox:
    return Inbox(location)


def inbox_of(location: str) -> Inbox:
    """The inbox of the store at *location* in this process."""
    return _inbox(location, os.getpid())


# -- answers -----------------------------------------------------------------------------------------------------------


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

    def problem(self, request: str) -> str:
        """Why a request whose answer is sealed could not be done; empty: it was done."""
        with self._store.snapshot() as view:
            row = self._table.get(view, 0, (request,))
        return "" if row is None else str(row[0])

    def put(
        self, batch: WriteBatch, request: str, error: HeadwaterError | None, effect: dict[str, Any] | None = None
    ) -> None:
        """Answer *request* with the seal of *batch*. :param effect: what was done."""
        self._given.add(request)
        problem = ("", "") if error is None else (error.message, error.next_step or "")
        self._table.put(batch, 0, (request,), (*problem, effect or {}))

    def forget_old(self, batch: WriteBatch) -> None:
        """Forget the answers to requests of more than a day ago, none of which is on the board any more."""
        self._table.delete_range(batch, 0, (_time_prefix(0),), (_time_prefix(time.time() - _KEPT_SECONDS),))


# -- asking ------------------------------------------------------------------------------------------------------------


def leave(location: str | Path, request: Request) -> bool:
    """Queue *request* for the owner of the store at *location*, without waiting; ``False``: it is queued already."""
    return open_board(str(location)).create(request.name, json.dumps(request.to_json()).encode())


def queued(location: str | Path) -> list[Request]:
    """The requests to the owner of the store at *location* that are not answered yet, the oldest first."""
    board = open_board(str(location))
    requests = []
    for name in board.list(INBOX):
        record = board.read(name)
        with suppress(ValueError):
            requests.append(Request.parse(b"" if record is None else record.data or b""))
    return sorted(requests, key=lambda request: request.asked_us)


def withdraw(location: str | Path, request: str) -> None:
    """Take back the request with this id: it is never done.

    :raises NoSuchRequest: it is not queued. :raises RequestBegun: its owner has begun with it.
    """
    board = open_board(str(location))
    claim = b"" if board.read(f"{INBOX}/{request}") is None else _claim(board, request, _WITHDRAWN)
    if claim == _OWNER:
        raise RequestBegun(
            f"Request {request} cannot be withdrawn: it was begun.",
            next_step="Wait until it is done, then ask for the opposite.",
        )
    if claim != _WITHDRAWN:
        raise NoSuchRequest(
            f"No request {request} is queued: it was answered or withdrawn.",
            next_step="List the queued requests: headwater requests",
        )
    _remove(board, request)


def withdraw_step(location: str | Path, request: str) -> str:
    """What to run to withdraw the request with this id."""
    return f"headwater requests --store {shlex.quote(str(location))} --withdraw {request}"


def ask(
    location: str,
    request: Request,
    open_state: Callable[[], AbstractContextManager[Answering]],
    seconds: float,
    whose: str,
) -> dict[str, Any]:
    """Ask the owner of the store at *location*, and wait for the answer; what was done.

    A wait that is interrupted (Ctrl-C) withdraws the request, if it has not begun.

    :param open_state: opens what has its answers, to read. :param whose: name of the one that is asked, for errors.
    :raises RequestFailed: what it answered. :raises NoAnswer: none in time; the request stays queued.
    """
    board = open_board(location)
    end = time.monotonic() + seconds
    leave(location, request)
    try:
        while board.read(request.name) is not None and time.monotonic() < end:
            time.sleep(max(_LOOK_SECONDS, board.poll_seconds / 4))
    except KeyboardInterrupt:
        with suppress(HeadwaterError):
            withdraw(location, request.id)
        raise
    answer = _answer(request, open_state)
    if answer is None:
        raise NoAnswer(
            f"The {whose} did not answer within {seconds:g} s. The request is queued, and is done when it runs.",
            next_step=f"Look whether it runs: headwater status. To withdraw the request: "
            f"{withdraw_step(location, request.id)}",
        )
    error, next_step, effect = answer
    if error:
        raise RequestFailed(error, next_step=next_step or None)
    return dict(effect)


def _answer(request: Request, open_state: Callable[[], AbstractContextManager[Answering]]) -> Any:
    try:
        with open_state() as state, state.snapshot() as view:
            catalog = Catalog.load(view)
            return catalog.open(ANSWERS).get(view, 0, (request.id,)) if ANSWERS.name in catalog.names() else None
    except StoreNotFound:
        return None


def ask_capture(location: str | Path, command: CaptureCommand, seconds: float = 30.0) -> dict[str, Any]:
    """Ask the running capture of the store at *location*, and wait for its answer; what it did.

    :raises RequestFailed: what the capture answered. :raises NoAnswer: none in time.
    :raises StoreNotFound: there is no store.
    """
    open_reader(location).close()
    return ask(str(location), Request(command), lambda: open_reader(location), seconds, "capture")


def ask_query(state: str, query: str, command: QueryCommand, seconds: float = 30.0) -> dict[str, Any]:
    """Ask the running query whose state is at *state*, and wait for its answer; what it did.

    :raises RequestFailed: what it answered. :raises NoAnswer: none in time.
    :raises StoreNotFound: there is no such query.
    """
    with QueryReader(state, query) as reader:
        reader.snapshot().close()
    return ask(state, Request(command, query), lambda: QueryReader(state, query), seconds, f"query {query!r}")


def leave_note(location: str | Path, log: str, text: str, plan: str) -> None:
    """Have the capture note *text* among the events of *log*: what a task saw while it read the backfill.

    It is noted once for each *plan*, whatever its numbers: many tasks can see the same.
    """
    kind = re.sub(r"\d+", "", text)
    request = hashlib.sha256("\0".join((log, plan, kind)).encode()).hexdigest()[:32]
    leave(location, Request(NoteEvent(log, text), id=request))
