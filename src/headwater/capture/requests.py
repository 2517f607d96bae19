"""Requests to a running capture from other processes: "capture this table, too".

A request is a row in a small store beside the capture's own, so the two processes need no connection. The capture
looks once a second, does it at a boundary, and seals its answer; a request that was answered is never done again.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError, TransientError
from headwater.state import Catalog, Field, FieldType, Snapshot, StateReader, StateTable, TableSchema, WriteBatch
from headwater.state import open_reader as open_store_reader
from headwater.state.beside import open_beside_reader, open_beside_writer
from headwater.state.errors import StoreNotFound, StoreOwned
from headwater.stream import Epoch

REQUESTS = TableSchema(
    "capture_requests",
    1,
    key=(Field("id", FieldType.TEXT),),
    value=(Field("kind", FieldType.TEXT), Field("detail", FieldType.JSON)),
)
ANSWERS = TableSchema(
    "capture_answers",
    1,
    key=(Field("id", FieldType.TEXT),),
    value=(Field("error", FieldType.TEXT), Field("next_step", FieldType.TEXT), Field("result", FieldType.JSON)),
)
ADD_TABLES = "add_tables"
RENEW_TABLES = "renew_tables"
RENEW_SOURCE = "renew_source"
MIGRATE = "migrate"
COMPACT = "compact"
REMARK = "remark"
_BESIDE = "requests"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks of the capture."""

    id: str
    kind: str
    detail: dict[str, Any]


class Requests:
    """The requests to the capture of the store at *location*, as the capture sees them.

    :param names: of the store beside it that holds them: others than the capture are asked in the same way.
    """

    def __init__(self, location: str | Path, *names: str) -> None:
        self._location = str(location)
        self._names = names or (_BESIDE,)
        self._reader: StateReader | None = None
        self._looked = 0.0

    def new(self, answered: Answers) -> list[Request]:
        """Those that were not answered yet; looks once a second at most."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return []
        return self.unanswered(answered)

    def unanswered(self, answered: Answers) -> list[Request]:
        """Those that were not answered yet, as of now."""
        self._looked = time.monotonic()
        if self._reader is None:
            try:
                self._reader = open_beside_reader(self._location, *self._names)
            except StoreNotFound:
                return []
        with self._reader.snapshot() as view:
            return [request for request in _all(view) if request.id not in answered]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Answers:
    """The answers of a capture, sealed with what it did."""

    def __init__(self, catalog: Catalog, view: Snapshot, batch: WriteBatch) -> None:
        self._table: StateTable = catalog.open_or_create(ANSWERS, batch)
        self._ids = {key[0] for key, _ in self._table.scan(view, 0)}

    def __contains__(self, request: str) -> bool:
        return request in self._ids

    def put(
        self, batch: WriteBatch, request: str, error: HeadwaterError | None, result: dict[str, Any] | None = None
    ) -> None:
        self._ids.add(request)
        problem = ("", "") if error is None else (error.message, error.next_step or "")
        self._table.put(batch, 0, (request,), (*problem, result or {}))


def ask(location: str | Path, kind: str, detail: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
    """Ask the running capture of the store at *location*, and wait for its answer; what it tells of the result.

    :raises HeadwaterError: what the capture answered. :raises TransientError: no answer in time.
    :raises StoreNotFound: there is no store.
    """
    request = Request(uuid.uuid4().hex, kind, detail)
    end = time.monotonic() + seconds
    with open_store_reader(location) as reader:
        put_request(str(location), (_BESIDE,), request, end)
        return wait_for_answer(reader, request.id, end, "capture", seconds)


def leave(location: str | Path, kind: str, detail: dict[str, Any], seconds: float = 30.0) -> None:
    """Write a request down for the next capture of the store at *location*; nobody waits for the answer."""
    put_request(str(location), (_BESIDE,), Request(uuid.uuid4().hex, kind, detail), time.monotonic() + seconds)


def remark(location: str | Path, log: str, text: str, plan: str, seconds: float = 30.0) -> None:
    """Have the capture note *text* among the events of *log*: what a task saw while it read the history.

    It is noted once for each *plan*, whatever its numbers: many tasks may see the same.
    """
    kind = re.sub(r"\d+", "", text)
    request = hashlib.sha256("\0".join((log, plan, kind)).encode()).hexdigest()[:32]
    detail = {"log": log, "text": text}
    put_request(str(location), (_BESIDE,), Request(request, REMARK, detail), time.monotonic() + seconds)


def wait_for_answer(reader: StateReader, request: str, end: float, whose: str, seconds: float) -> dict[str, Any]:
    """The answer to *request* in the store of the one that was asked; until the clock shows *end*.

    :raises HeadwaterError: what it answered. :raises TransientError: no answer in time.
    """
    while time.monotonic() < end:
        with reader.snapshot() as view:
            catalog = Catalog.load(view)
            found = catalog.open(ANSWERS).get(view, 0, (request,)) if ANSWERS.name in catalog.names() else None
        if found is not None:
            if found[0]:
                raise HeadwaterError(found[0], next_step=found[1] or None)
            told: dict[str, Any] = found[2]
            return told
        time.sleep(0.1)
    raise TransientError(
        f"The {whose} did not answer within {seconds:g} s.",
        next_step="Look whether it runs; it will do what was asked when it does.",
    )


def put_request(location: str, names: tuple[str, ...], request: Request, end: float) -> None:
    """Write the request down; somebody else who asks at the same time is waited for."""
    while True:
        try:
            with open_beside_writer(location, *names, takeover=False) as store:
                batch = WriteBatch()
                with store.snapshot() as view:
                    table = Catalog.load(view).open_or_create(REQUESTS, batch)
                    table.put(batch, 0, (request.id,), (request.kind, request.detail))
                store.seal(Epoch(store.committed_epoch()).next(time.time_ns() // 1_000_000), batch)
            return
        except StoreOwned:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)


def _all(view: Snapshot) -> list[Request]:
    catalog = Catalog.load(view)
    if REQUESTS.name not in catalog.names():
        return []
    return [Request(key[0], *values) for key, values in catalog.open(REQUESTS).scan(view, 0)]
