"""RawCursor: the documents of a command as the wire has them: whole batches, none of them decoded here.

An answer holds its documents as one BSON array; a batch is that array's bytes. A cursor belongs to the session that
opened it. A thread asks for the next answers, a few ahead, while those before are being used.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Self

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo.errors import PyMongoError

from headwater.sources.mongodb.connection import RAW, Client, Dsn, server_errors
from headwater.sources.mongodb.offset import token_text

EMPTY: Final = memoryview(b"\x05\0\0\0\0")
_INT: Final = struct.Struct("<i")
_ARRAY: Final = 4
_DOCUMENT: Final = 3
_LONGEST_NAME: Final = 64
CLOSE_SECONDS: Final = 2.0
"""How long the end of a cursor waits for an answer that is on its way."""
AHEAD: Final = 2
FEW_BYTES: Final = 256 << 10
PACE_SECONDS: Final = 0.015
"""After few documents of a stream it is worth while to wait for more of them."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server waits for documents before it answers with none, in milliseconds.

    :ivar quick: after it had some. :ivar idle: after it had none.
    """

    quick: int
    idle: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One answer.

    :ivar documents: the bytes of a BSON array of documents.
    :ivar token: where a change stream is after them; empty where it is none.
    :ivar is_last: there is nothing more; of a change stream: what it watched is gone.
    """

    documents: memoryview
    token: str = ""
    is_last: bool = False

    @property
    def is_empty(self) -> bool:
        return len(self.documents) <= len(EMPTY)


class RawCursor:
    """A cursor of one command; use it from one thread.

    :param command: with the collection, or 1, under the name of the command, and all but its ``cursor`` options.
    :param patience: of a command whose documents come one day; ``None``: what there is, is there.
    :ivar opened: the first answer.
    :raises SourceError: the command was refused.
    """

    def __init__(
        self,
        dsn: Dsn,
        client: Client,
        database: str,
        command: Mapping[str, Any],
        *,
        batch_size: int,
        patience: Patience | None = None,
    ) -> None:
        self._dsn, self._database, self._batch_size, self._patience = dsn, client[database], batch_size, patience
        self._session = client.start_session(causal_consistency=False)
        self._answers: SimpleQueue[Batch | Exception] = SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._wait_ms = None if patience is None else patience.idle
        self._has_failed = False
        self._id = 0
        try:
            with server_errors(dsn):
                answer = self._database.command(dict(command), session=self._session, codec_options=RAW)
                self.opened = self._taken(answer)
        except BaseException:
            self._session.end_session()
            raise
        self._is_over = self.opened.is_last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self) -> None:
        """Begin to ask for the next answers."""
        if self._thread is None and not self._is_over:
            self._thread = threading.Thread(target=self._fetch, name="headwater-mongodb", daemon=True)
            self._thread.start()

    def next(self, timeout: float | None = None) -> Batch | None:
        """The next batch; ``None``: it has not come within *timeout* seconds, or there is none.

        :raises SourceUnreachable: the connection broke. :raises SourceError: the cursor came to an end with an error.
        """
        if self._is_over:
            return None
        self.ask()
        try:
            answer = self._answers.get(timeout=timeout)
        except Empty:
            return None
        self._room.release()
        if isinstance(answer, Exception):
            self._is_over = self._has_failed = True
            with server_errors(self._dsn):
                raise answer
        self._is_over = answer.is_last
        return answer

    @property
    def is_open(self) -> bool:
        """Whether there may be more."""
        return not self._is_over

    def close(self) -> None:
        """End it at the server, too. Closing twice is fine."""
        self._closing.set()
        self._room.release()
        self._is_over = True
        kill, self._id = self._id, 0
        if kill and not self._has_failed:
            with suppress(PyMongoError):  # without our session: a question may be on its way in it, and ends so
                self._database.command({"killCursors": self._collection, "cursors": [Int64(kill)]})
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._session.end_session()

    def _fetch(self) -> None:
        """The thread that asks."""
        while True:
            self._room.acquire()
            if self._closing.is_set():
                return
            try:
                batch = self._more()
            except Exception as error:
                self._answers.put(error)
                return
            self._answers.put(batch)
            if batch.is_last:
                return
            if self._patience is not None:
                self._wait_ms = self._patience.idle if batch.is_empty else self._patience.quick
                if not batch.is_empty and len(batch.documents) < FEW_BYTES:
                    self._closing.wait(PACE_SECONDS)

    def _more(self) -> Batch:
        command: dict[str, Any] = {
            "getMore": Int64(self._id),
            "collection": self._collection,
            "batchSize": self._batch_size,
        }
        if self._wait_ms is not None:
            command["maxTimeMS"] = self._wait_ms
        return self._taken(self._database.command(command, session=self._session, codec_options=RAW))

    def _taken(self, answer: Any) -> Batch:
        assert isinstance(answer, RawBSONDocument)
        cursor = answer["cursor"]
        assert isinstance(cursor, RawBSONDocument)
        raw = memoryview(cursor.raw)
        found = dict(_places(raw))
        documents = next((raw[slice(*found[name])] for name in (b"nextBatch", b"firstBatch") if name in found), EMPTY)
        self._id = int.from_bytes(raw[slice(*found[b"id"])], "little", signed=True)
        self._collection = _text(raw, found[b"ns"]).partition(".")[2]
        token = ""
        if b"postBatchResumeToken" in found:
            token = token_text(bson.decode(raw[slice(*found[b"postBatchResumeToken"])]))
        return Batch(documents, token, not self._id)


def _places(raw: memoryview) -> list[tuple[bytes, tuple[int, int]]]:
    """Where the values of the few fields of an answer's ``cursor`` lie."""
    made = []
    at, end = 4, len(raw) - 1
    while at < end:
        kind = raw[at]
        name_end = at + 1 + bytes(raw[at + 1 : at + 1 + _LONGEST_NAME]).index(0)
        start = name_end + 1
        if kind in (_DOCUMENT, _ARRAY):
            stop = start + _INT.unpack_from(raw, start)[0]
        elif kind == 2:
            stop = start + 4 + _INT.unpack_from(raw, start)[0]
        else:
            stop = start + {8: 1, 16: 4, 18: 8, 17: 8, 1: 8, 9: 8, 10: 0, 7: 12}[kind]
        made.append((bytes(raw[at + 1 : name_end]), (start, stop)))
        at = stop
    return made


def _text(raw: memoryview, place: tuple[int, int]) -> str:
    return str(raw[place[0] + 4 : place[1] - 1], "utf-8")
