"""Storage: the directory that a sink of files lives in, on this machine's file system or in an object store.

On a local file system what is written is synced before it is named in a commit, so that a commit that survives a power
cut has its rows. It can be pickled; the connection is made where it is used.

The libraries below raise plain errors for an object store that does not answer or refuses the keys, and put the reason
into the text: :func:`names_store_errors` gives them our names. Errors of the operating system have a number and are
left alone, as is everything that is not known here.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final, TypeVar
from urllib.parse import unquote, urlparse, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from headwater.errors import HeadwaterError
from headwater.sinks.errors import SinkLoginRefused, SinkUnreachable, SinkUnwritable
from headwater.sources.table import SourceTable
from headwater.sources.target_names import chosen_directory
from headwater.system.files import make_private, open_private, sync

F = TypeVar("F", bound=Callable[..., Any])

_REFUSED: Final = re.compile(
    r"\b40[13] (Forbidden|Unauthorized)|HTTP status 40[13]\b|HTTP response code 40[13]\b|Access ?Denied|ACCESS_DENIED"
    r"|InvalidAccessKeyId|INVALID_ACCESS_KEY_ID|SignatureDoesNotMatch|SIGNATURE_DOES_NOT_MATCH|ExpiredToken"
    r"|EXPIRED_TOKEN|InvalidToken|INVALID_CLIENT_TOKEN_ID|TokenRefreshRequired|Unauthenticated",
    re.IGNORECASE,
)
_NO_ANSWER: Final = re.compile(
    r"error sending request|operation timed out|HTTP error|error decoding response body|request or response body error"
    r"|non-2xx status code: (5\d\d|408|429)|\b(5\d\d) (Internal|Bad Gateway|Service|Gateway|Slow)|HTTP status 5\d\d\b"
    r"|HTTP response code 5\d\d\b|NETWORK_CONNECTION|curlCode|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE"
    r"|REQUEST_TIMEOUT|THROTTLING|DEADLINE_EXCEEDED|CURL error",
    re.IGNORECASE,
)
_ADDRESS: Final = re.compile(r"https?://[^\s/?#'\"<>]+")


def endpoint_of(options: Mapping[str, str]) -> str:
    """The server that *options* of an object store name; empty: none."""
    return next((value for name, value in options.items() if "endpoint" in name.lower()), "")


def store_error(error: BaseException, root: str, endpoint: str) -> HeadwaterError | None:
    """Our error for *error* of the object store that has *root*; ``None``: it is something else.

    :param endpoint: its server, if the error does not name one.
    """
    text = str(error)
    if isinstance(error, HeadwaterError) or getattr(error, "errno", None) is not None:
        return None
    refused = _REFUSED.search(text)
    if refused is None and not _NO_ANSWER.search(text):
        return None
    address = _ADDRESS.search(text)
    host = urlsplit(address[0] if address else endpoint).netloc.rpartition("@")[2]
    server = f"The object store at {host} ({root})" if host else f"The object store of {root}"
    if refused is not None:
        return SinkLoginRefused(
            f"{server} refused the keys: {refused[0]}.",
            next_step="Write valid keys to the options of the sink, or to the files that they name.",
        )
    return SinkUnreachable(
        f"{server} did not answer, or failed.",
        next_step="No action needed if it is back soon: the batch is tried again until the object store answers.",
    )


@contextmanager
def _named(sink: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found = store_error(error, *sink.object_store)
        if found is None:
            raise
        raise found from error


def names_store_errors(method: F) -> F:
    """A method of a sink of files, with the errors of its object store in our words."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _named(self):
            return method(self, *args, **kwargs)

    @functools.wraps(method)
    def yielding(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _named(self):
            yield from method(self, *args, **kwargs)

    return yielding if inspect.isgeneratorfunction(method) else wrapped  # type: ignore[return-value]


BOUNDS: Final = {"timeout": "30s", "connect_timeout": "10s", "retry_timeout": "60s"}
"""How long one request to an object store waits for its answer, and for how long it is tried again."""
_REQUESTS: Final = 16
"""Requests to an object store at a time."""
_chosen: dict[tuple[str, str, str], str] = {}
"""Directories of tables in object stores, where it costs a request to look for one."""


@dataclass(frozen=True)
class Storage:
    """A directory.

    :param root: a path, ``file://…``, or the address of a directory in an object store (``s3://…``).
    :param options: of the object store; they may hold passwords and are never shown.
    :param is_private: on a file system, only this user can read what is created; otherwise the umask decides.
    """

    root: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_private: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Storage, (self.root, self.options, self.is_private)

    @property
    def is_local(self) -> bool:
        return self._local is not None

    @cached_property
    def _local(self) -> Path | None:
        parsed = urlparse(self.root)
        if parsed.scheme == "file":
            return Path(unquote(parsed.path))
        return Path(self.root).absolute() if len(parsed.scheme) < 2 else None

    @property
    def address(self) -> str:
        """What names it to other libraries."""
        return str(self._local or self.root)

    @property
    def client_options(self) -> dict[str, str]:
        """The options for delta-rs: a server that says nothing is not waited for without end."""
        return {} if self.is_local else {**BOUNDS, **self.options}

    def within(self, *names: str) -> Storage:
        """The directory *names* in it."""
        return Storage("/".join((self.address.rstrip("/"), *names)), self.options, self.is_private)

    def directory_of(self, table: SourceTable) -> str:
        """The name of the directory of *table* in it."""
        if self._local is not None:
            return chosen_directory(table.namespace, table.name, self._has_directory)
        key = (self.address, table.namespace, table.name)
        if key not in _chosen:
            _chosen[key] = chosen_directory(table.namespace, table.name, self._has_directory)
        return _chosen[key]

    def of_table(self, table: SourceTable) -> Storage:
        """The directory of *table* in it."""
        return self.within(self.directory_of(table))

    def target_of(self, table: SourceTable) -> str:
        """The directory of *table*; the same for two tables that share it, also where the file system ignores case."""
        directory = self.directory_of(table)
        if self._local is not None and (self._local / directory).is_dir():
            there = (self._local / directory).stat()
            twins = (name for name in os.listdir(self._local) if name.casefold() == directory.casefold())  # noqa: PTH208
            return min(name for name in twins if (self._local / name).stat().st_ino == there.st_ino)
        return directory

    def _has_directory(self, name: str) -> bool:
        """Whether there is a directory of exactly this name, also where the file system ignores case."""
        if self._local is not None:
            return os.path.isdir(self._local / name) and name in os.listdir(self._local)  # noqa: PTH112, PTH208 - too long: no
        selector = pafs.FileSelector(name, allow_not_found=True, recursive=False)
        return bool(self.files.get_file_info(selector))

    @cached_property
    def files(self) -> Any:
        """Its file system: paths are relative to the directory."""
        if self._local is not None:
            return pafs.SubTreeFileSystem(str(self._local), pafs.LocalFileSystem())
        return pafs.PyFileSystem(self._object_store)

    @cached_property
    def _object_store(self) -> Any:
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(self.root, self.client_options)

    def _upload(self, name: str, data: bytes) -> None:
        # Its own wrapper for pyarrow takes no buffers, which is what pyarrow gives it.
        stream = self._object_store._handler.open_output_stream(name, None)
        stream.write(data)
        stream.close()

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A new file, to be written; durable when the context ends well."""
        if self._local is None:
            memory = pa.BufferOutputStream()
            yield memory
            self._upload(name, memory.getvalue().to_pybytes())
            return
        path = self._local / name
        try:
            file = self._open(path)
        except FileNotFoundError:
            if self.is_private:
                make_private(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open(path)
        with file:
            yield pa.PythonFile(file, "w")
            file.flush()
            os.fsync(file.fileno())

    def _open(self, path: Path) -> IO[bytes]:
        return open_private(path, "wb") if self.is_private else path.open("wb")

    def sync(self, *names: str) -> None:
        """Make files or directories that others wrote durable."""
        if self._local is None:
            return
        for name in names:
            sync(self._local / name)

    def has(self, name: str) -> bool:
        """Whether the file is there; of an object store, where asking takes long, it is believed."""
        return self._local is None or (self._local / name).exists()

    def sizes(self, names: Sequence[str]) -> Sequence[int | None]:
        """The size of each file in bytes; ``None``: it is missing. One ``stat``, or one request, per file."""
        if self._local is None and len(names) > 1:
            with ThreadPoolExecutor(min(_REQUESTS, len(names))) as threads:
                return tuple(threads.map(self._size, names))
        return tuple(map(self._size, names))

    def _size(self, name: str) -> int | None:
        if self._local is None:
            info = self.files.get_file_info(name)
            return int(info.size) if info.type == pafs.FileType.File else None
        try:
            return (self._local / name).stat().st_size
        except FileNotFoundError:
            return None

    def list(self, name: str = "") -> list[Any]:
        """The files in it, with their modification times; none if it is not there."""
        return list(self.files.get_file_info(pafs.FileSelector(name, allow_not_found=True, recursive=True)))

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone is no error."""
        try:
            self.files.delete_file(name)
        except FileNotFoundError:
            pass

    def check(self) -> None:
        """:raises SinkUnwritable: nothing can be written there."""
        name = "_headwater_staging/.writable"
        try:
            with self.create(name) as stream:
                stream.write(b"1")
            self.remove(name)
        except OSError as error:
            found = store_error(error, self.root, endpoint_of(self.options))
            if found is not None:
                raise found from error
            raise SinkUnwritable(
                f"Nothing can be written to {self.root}: {error.strerror or type(error).__name__}.",
                next_step="Create the directory, or give this user the right to write to it.",
            ) from error
