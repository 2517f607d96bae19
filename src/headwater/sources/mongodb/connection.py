"""Connections to MongoDB: the address without its password, one client per process, errors in our own words.

An address is what every MongoDB client takes (``mongodb://`` or ``mongodb+srv://``), with options of ours among its
own:

=================  =======================================================================================
``startToken``     a resume token in hexadecimal: a new capture begins after it instead of now
``columns``        ``inferred`` or ``document``: of collections for which nothing else is said
=================  =======================================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, TypeAlias

import pymongo
from bson import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo import errors as driver
from pymongo.uri_parser import parse_uri

from headwater.databases.address import Url, one_of
from headwater.databases.timeouts import connect_seconds
from headwater.sources.dsn import SourceAddress, reread
from headwater.sources.errors import (
    AccessDenied,
    InvalidDsn,
    LoginRefused,
    LogPurged,
    SnapshotExpired,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceProtocolError,
    SourceUnreachable,
)

Client: TypeAlias = "pymongo.MongoClient[dict[str, Any]]"

RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(document_class=RawBSONDocument)
RESNAPSHOT: Final = "Run: headwater resnapshot"

_SPLITTING: Final = (((6, 0, 9), (6, 1)), ((7, 0), None))
"""The versions, from and before, that give an event of more than 16 MB in parts."""
_SELECTION_MS: Final = 10_000
_LEAST_BEAT_MS: Final = 500
_MOST_BEAT_MS: Final = 10_000

_NO_LOGIN: Final = frozenset((18, 8000))
_DENIED: Final = frozenset((13, 31, 33)) | _NO_LOGIN
_BUSY: Final = frozenset((24, 112, 117, 202, 46, 11601, 462, 325))
_EXPIRED: Final = frozenset((239, 246, 13388))
_PURGED: Final = frozenset((286,))
_BAD_TOKEN: Final = frozenset((260, 280))
_GONE: Final = frozenset(
    (6, 7, 43, 63, 64, 89, 91, 133, 150, 175, 189, 237, 234, 262, 9001, 10107, 11600, 11602, 13435, 13436, 50, 314, 136)
)
_SHARD_ADDED: Final = 50865
"""A router that comes to a new shard adds a token to our options, and refuses the two of them: a new stream has it."""
_REMOVED: Final = "removed shard"
_OTHER_COLLECTION: Final = 361
_NOT_FOUND: Final = frozenset((26,))
_IS_PASSWORD: Final = re.compile(r"(mongodb(?:\+srv)?://[^:/@\s]*):[^@\s]*@")


class BadToken(SourceError):
    """The server does not know a resume token, and may still know its time."""


class CollectionReplaced(SourceError):
    """The collection of a name is not the one that was asked for, or is not there."""


class Dsn(SourceAddress):
    """Where a replica set or a cluster is: ``mongodb://user:password@host:27017/database?replicaSet=rs0``."""

    KIND = "MongoDB"
    SCHEMES = ("mongodb", "mongodb+srv")
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "columns": one_of("inferred", "document"),
        "starttoken": str,
    }
    """Ours, in lower case; the library checks the others."""
    NEXT_STEP = (
        "Write mongodb://user@host:27017/database?replicaSet=rs0, with %-escapes. Our own options: columns (inferred"
        " or document) and startToken."
    )

    def _read(self, text: str) -> None:
        plain, _, query = text.partition("?")
        parts = [part for part in query.split("&") if part]
        theirs = "&".join(part for part in parts if part.partition("=")[0].lower() not in self.OPTIONS)
        self._address = f"{plain}?{theirs}" if theirs else plain
        url = Url.parse(text, strict=False)
        if url.scheme not in self.SCHEMES or not any(url.hosts):
            raise ValueError
        if url.scheme == "mongodb":
            try:
                parse_uri(self._address, warn=False)
            except driver.PyMongoError:
                raise ValueError from None
        own = {name.lower(): value for name, value in url.options.items() if name.lower() in self.OPTIONS}
        self.options = {name: self.OPTIONS[name](value) for name, value in own.items()}
        self.columns: str = self.options.get("columns", "inferred")
        self.start_token: str = self.options.get("starttoken", "")
        self.hosts = ",".join(url.hosts)
        self.user, self.database, self._secrets = url.user, url.database, (url.password,)

    @property
    def address(self) -> str:
        """For the library, with the password: for connecting alone, never for a message."""
        return self._address

    def defaults(self) -> dict[str, Any]:
        """The options that we set where the address does not."""
        settings = {
            "serverSelectionTimeoutMS": min(_SELECTION_MS, round(self.timeout_seconds * 1000)),
            # those of the monitor, too: it notices a silent server, and ends the reads that wait for it
            "connectTimeoutMS": connect_seconds(self.timeout_seconds) * 1000,
            "heartbeatFrequencyMS": max(_LEAST_BEAT_MS, min(_MOST_BEAT_MS, round(self.timeout_seconds * 250))),
            "socketTimeoutMS": round(self.timeout_seconds * 1000),
            "appName": "headwater",
            "retryReads": False,  # a read that broke goes on where it was, which is ours to know
        }
        named = {part.partition("=")[0].lower() for part in self._address.partition("?")[2].split("&")}
        return {name: value for name, value in settings.items() if name.lower() not in named}

    def without_timeout(self) -> dict[str, Any]:
        """For who waits for the server to look through its log, however long: keep-alive tells whether it is there."""
        return {"socketTimeoutMS": 0} if "socketTimeoutMS" in self.defaults() else {}

    @property
    def _place(self) -> str:
        return f"{self._address.partition('://')[0]}://{self.hosts}"

    def hide(self, text: str) -> str:
        return super().hide(_IS_PASSWORD.sub(r"\1:***@", text))


_clients: dict[tuple[int, str], Client] = {}
_lock = threading.Lock()


def connect(dsn: Dsn, **options: Any) -> Client:
    """A client of its own; nothing is connected before it is asked. :raises InvalidDsn: an option is wrong."""
    dsn = reread(dsn)
    with server_errors(dsn):
        return pymongo.MongoClient(dsn.address, **(dsn.defaults() | options))


def shared(dsn: Dsn) -> Client:
    """The client of this process for *dsn*: connections are used again, by any thread."""
    dsn = reread(dsn)
    key = os.getpid(), dsn.address
    with _lock:
        if key not in _clients:
            _clients[key] = connect(dsn)
        return _clients[key]


@atexit.register
def _close_shared() -> None:
    for (process, _), client in _clients.items():
        if process == os.getpid():
            client.close()


def require_version(dsn: Dsn, build: Mapping[str, Any]) -> str:
    """The version that ``buildInfo`` tells. :raises SourceMisconfigured: it is too old."""
    version = str(build["version"])
    numbers = tuple(build["versionArray"][:3])
    if not any(first <= numbers and (before is None or numbers < before) for first, before in _SPLITTING):
        raise SourceMisconfigured(
            f"{dsn} is MongoDB {version}, which cannot tell of large documents.",
            next_step="Capture from MongoDB 6.0.9 or a later 6.0, or from 7.0 or later.",
        )
    return version


@contextlib.contextmanager
def server_errors(dsn: Dsn) -> Iterator[None]:
    """Errors of the library and the server leave the block as errors of our tree, without the password."""
    try:
        yield
    except driver.PyMongoError as error:
        raise translated(error, dsn) from None
    except BSONError as error:
        raise SourceProtocolError(
            f"An answer of {dsn} cannot be read: {type(error).__name__}.",
            next_step="Check the collection with db.runCommand({validate: …, full: true}): a text may not be UTF-8.",
        ) from None


def translated(error: driver.PyMongoError, dsn: Dsn) -> SourceError:
    """The error of our tree for one of the library: by the server's number. No document of an answer is repeated."""
    if isinstance(error, driver.ConfigurationError) and "DNS" in str(error):
        return _unreachable("its name is not found", dsn)
    if isinstance(error, driver.ConfigurationError | driver.InvalidURI):
        return InvalidDsn(
            "The connection string of MongoDB has an option that cannot be used.",
            next_step="Write mongodb://user@host:27017/database?replicaSet=rs0.",
        )
    if isinstance(error, driver.InvalidName):
        return SourceMisconfigured(
            "A database or a collection has a name that MongoDB does not allow.",
            next_step="Name it as show dbs and show collections do: database.collection.",
        )
    if isinstance(error, driver.ConnectionFailure):
        return _unreachable(type(error).__name__, dsn)
    if not isinstance(error, driver.OperationFailure):
        return SourceError(
            f"A command to {dsn} could not be sent, or its answer not be read: {type(error).__name__}.",
            next_step=f"Run: headwater doctor {dsn}",
        )
    code = error.code or 0
    said = _said(error, dsn)
    if code in _PURGED and _REMOVED in str((error.details or {}).get("errmsg")):
        return LogPurged(
            f"{dsn} no longer has all changes after our position: a shard was removed before they were captured.",
            next_step=RESNAPSHOT,
        )
    if code in _PURGED:
        return LogPurged(
            f"{dsn} no longer has the changes after our position: its oplog has rolled over.",
            next_step=f"Make the oplog larger: db.adminCommand({{replSetResizeOplog: 1, size: …}}). {RESNAPSHOT}",
        )
    if code in _BAD_TOKEN:
        return BadToken(f"{dsn} does not know the resume token: {said}.", next_step=RESNAPSHOT)
    if code in _EXPIRED:
        return SnapshotExpired(
            f"{dsn} no longer has the documents as they were at the time of the snapshot.",
            next_step="Take a new snapshot; where it is read for longer than the server keeps it, let that keep more:"
            " db.adminCommand({setParameter: 1, minSnapshotHistoryWindowInSeconds: 3600})",
        )
    if code in _DENIED:
        text = f"{dsn} refused the user {dsn.user!r}: {said}."
        if code in _NO_LOGIN:
            return LoginRefused(text, next_step="Check the user name and its password.")
        return AccessDenied(text, next_step=f"Run: headwater doctor {dsn}")
    if code == _OTHER_COLLECTION:
        return CollectionReplaced(f"{dsn} has another collection of that name by now.", next_step=RESNAPSHOT)
    if code in _NOT_FOUND:
        return SourceNotFound(f"{dsn} does not have it: {said}.")
    if code in _BUSY:
        return SourceBusy(f"{dsn} has no room now: {said}.", next_step="Try again.")
    if code in _GONE or code == _SHARD_ADDED or error.has_error_label("ResumableChangeStreamError"):
        return _unreachable(said, dsn)
    return SourceError(f"{dsn} refused a command (error {code}): {said}.", next_step=f"Run: headwater doctor {dsn}")


def _said(error: driver.OperationFailure, dsn: Dsn) -> str:
    """The name of the error; what the server says more may hold values of documents."""
    details = error.details or {}
    name = details.get("codeName")
    return dsn.hide(str(name or f"error {error.code}"))


def _unreachable(said: str, dsn: Dsn) -> SourceUnreachable:
    return SourceUnreachable(
        f"{dsn} cannot be reached: {said or 'the connection broke'}.",
        next_step="Check that the server runs and answers.",
    )
