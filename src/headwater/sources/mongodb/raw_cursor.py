"""RawCursor: the documents of a command as the wire has them: whole batches, none of them decoded here.

An answer holds its documents as one BSON array; a batch is that array's bytes. A cursor belongs to the session that
opened it, and every answer but the last is asked for in the background while the one before is being used.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
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


@dataclass(frozen=True, slots=True)
class Batch:
    """One answer.

    :ivar documents: the bytes of a BSON array of documents.
    :ivar token: where a change stream is after them; empty where it is none.
    :ivar is_last: there is nothing more. :ivar invalidated: a change stream ended because what it watched is gone.
    """

    documents: memoryview
    token: str = ""
    is_last: bool = False
    invalidated: bool = False

    @property
    def is_empty(self) -> bool:
        return len(self.documents) <= len(EMPTY)


class RawCursor:
    """A cursor of one command; use it from one thread.

    :param command: with the collection, or 1, under the name of the command, and all but its ``cursor`` options.
    :param wait_ms: how long the server waits for documents before it answers with none; ``None``: it never waits.
    :ivar at: the answer's ``atClusterTime``, where the command reads in a snapshot.
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
        wait_ms: int | None = None,
    ) -> None:
        self._dsn, self._database, self._batch_size, self.wait_ms = dsn, client[database], batch_size, wait_ms
        self._session = client.start_session(causal_consistency=False)
        self._questions: SimpleQueue[Future[Batch] | None] | None = None
        self._asked: Future[Batch] | None = None
        self._has_failed = False
        self._id = 0
        self.bytes_received = 0
        try:
            with server_errors(dsn):
                answer = self._database.command(dict(command), session=self._session, codec_options=RAW)
                self.opened = self._taken(answer)
        except BaseException:
            self._session.end_session()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self) -> None:
        """Ask for the next batch in the background, if nobody has yet."""
        if self._asked is None and self._id:
            if self._questions is None:
                self._questions = SimpleQueue()
                threading.Thread(
                    target=self._answer, args=(self._questions,), name="headwater-mongodb", daemon=True
                ).start()
            self._asked = Future()
            self._questions.put(self._asked)

    def next(self, timeout: float | None = None) -> Batch | None:
        """The next batch; ``None``: it has not come within *timeout* seconds, or there is none.

        :raises SourceUnreachable: the connection broke. :raises SourceError: the cursor came to an end with an error.
        """
        self.ask()
        if self._asked is None:
            return None
        try:
            with server_errors(self._dsn):
                made = self._asked.result(timeout)
        except NotYet:
            return None
        except BaseException:
            self._asked, self._has_failed = None, True
            raise
        self._asked = None
        return made

    @property
    def is_open(self) -> bool:
        """Whether there may be more."""
        return bool(self._id)

    def close(self) -> None:
        """End it at the server, too. Closing twice is fine."""
        asked, self._asked = self._asked, None
        if self._questions is not None:
            self._questions.put(None)
        kill, self._id = self._id, 0
        if kill and not self._has_failed:
            with suppress(PyMongoError):  # without our session: a question may be on its way in it, and ends so
                self._database.command({"killCursors": self._collection, "cursors": [Int64(kill)]})
        if asked is None or wait_for([asked], CLOSE_SECONDS).done:
            self._session.end_session()

    def _answer(self, questions: SimpleQueue[Future[Batch] | None]) -> None:
        """The thread that asks."""
        while (question := questions.get()) is not None:
            try:
                question.set_result(self._more())
            except BaseException as error:
                question.set_exception(error)

    def _more(self) -> Batch:
        command: dict[str, Any] = {
            "getMore": Int64(self._id),
            "collection": self._collection,
            "batchSize": self._batch_size,
        }
        if self.wait_ms is not None:
            command["maxTimeMS"] = self.wait_ms
        return self._taken(self._database.command(command, session=self._session, codec_options=RAW))

    def _taken(self, answer: Any) -> Batch:
        assert isinstance(answer, RawBSONDocument)
        cursor = answer["cursor"]
        assert isinstance(cursor, RawBSONDocument)
        raw = memoryview(cursor.raw)
        self.bytes_received += len(raw)
        found = dict(_places(raw))
        documents = next((raw[slice(*found[name])] for name in (b"nextBatch", b"firstBatch") if name in found), EMPTY)
        self._id = int.from_bytes(raw[slice(*found[b"id"])], "little", signed=True)
        self._collection = _text(raw, found[b"ns"]).partition(".")[2]
        token = ""
        if b"postBatchResumeToken" in found:
            token = token_text(bson.decode(raw[slice(*found[b"postBatchResumeToken"])]))
        return Batch(documents, token, not self._id, b"invalidated" in found)


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
