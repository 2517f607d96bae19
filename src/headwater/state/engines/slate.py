"""SlateDB for synchronous callers: one event loop per process, its errors in our words, its places from a URL.

SlateDB's Python binding is asynchronous; it and the object-store client run on threads of their own, which do not
survive ``fork``: a child of a process that has used them is told so, instead of hanging.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import threading
import uuid
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from headwater.state.errors import (
    InvalidLocation,
    StateError,
    StoreClosed,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreUnavailable,
    WriterFenced,
)
from headwater.system.files import UnsafeDirectory, check_private, make_root

try:
    import obstore
    from obstore.store import LocalStore, S3Store
    from slatedb import uniffi as slate
    from slatedb.uniffi._slatedb_uniffi import slatedb as _binding
except ImportError as missing:
    raise InvalidLocation(
        f"The object-store engine needs the package {missing.name}.",
        next_step="Run: pip install 'headwater[objectstore]'",
    ) from missing

__all__ = ["Place", "map_errors", "obstore", "run", "slate"]

REQUEST_SECONDS = 30.0
"""How long one request to the object store waits for its answer."""

RETRY_SECONDS = 30.0
"""How long a request to the object store is tried again before it counts as failed."""

CALL_SECONDS = 120.0
"""How long one call of SlateDB is waited for; SlateDB itself retries for ever."""

CLOSE_SECONDS = 10.0
"""How long the end of a database is waited for; all that was sealed is durable before."""

_T = TypeVar("_T")


def _copy_whole_buffers() -> None:
    """The binding writes each byte of a value by a Python loop; one memmove does the same, up to 17 times faster."""
    builder = getattr(_binding, "_UniffiRustBufferBuilder", None)
    if builder is None or not hasattr(builder, "_reserve"):
        return

    def write(self: Any, value: bytes) -> None:
        size = len(value)
        with self._reserve(size):
            target = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
            ctypes.memmove(target, bytes(value), size)

    builder.write = write


_copy_whole_buffers()


_FULL = re.compile(r"os error (27|28|122)\b|No space left on device|File too large|Disk quota exceeded|QuotaExceeded")
_DENIED = re.compile(r"os error (1|13|30)\b|Permission denied|Read-only file system|AccessDenied|403 Forbidden")


class _Loop:
    """The event loop thread; made at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._user: int | None = None

    def check_process(self) -> None:
        """:raises StoreClosed: the process that this one was forked from has used the engine."""
        if self._user is None:
            self._user = os.getpid()
        elif self._user != os.getpid():
            raise StoreClosed(
                "The object-store engine was used in the parent process before this one was forked, "
                "and cannot be used here.",
                next_step="Start worker processes with 'spawn', or open the store only in the children.",
            )

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        try:
            self.check_process()
        except StoreClosed:
            work.close()
            raise
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="headwater-slatedb", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)


_loop = _Loop()


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for one asynchronous call of the binding."""
    return _loop.start(work).result(CALL_SECONDS)


def shut_down(store: Any, seconds: float) -> bool:
    """End *store*, which can have ended by itself just before; ``False``: after *seconds* it has not ended yet.

    It then ends in the background, as soon as the object store answers. Nothing that was sealed depends on it.
    """
    ending = _loop.start(store.shutdown())
    if not wait([ending], seconds).done:
        return False
    try:
        ending.result()
    except slate.Error.Closed as error:
        if error.reason != slate.CloseReason.CLEAN:
            raise
    return True


@contextmanager
def map_errors(location: str) -> Iterator[None]:
    """Around every use of SlateDB and of the object store: refused in a forked child, errors in our words."""
    _loop.check_process()
    try:
        yield
    except slate.Error.Closed as error:
        if error.reason == slate.CloseReason.FENCED:
            raise WriterFenced(f"The state store at {location} was taken over; this writer has ended.") from error
        raise _named(location, f"has stopped: {error.message}") from error
    except slate.Error.Data as error:
        raise StoreCorrupt(
            f"The state store at {location} is damaged: {error.message}.", next_step="Restore it from a copy."
        ) from error
    except slate.Error as error:
        raise _named(location, f"did not answer: {error}") from error
    except (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError) as error:
        raise _denied(location, str(error).partition("\n")[0]) from error
    except FileNotFoundError as error:
        raise StoreNotFound(f"Part of the state store at {location} is gone.") from error
    except (obstore.exceptions.BaseError, TimeoutError) as error:
        first = str(error).partition("\n")[0] or f"no answer within {CALL_SECONDS:.0f} seconds"
        raise _named(location, f"did not answer: {first}") from error


def _named(location: str, what: str) -> StateError:
    if _FULL.search(what):
        return StoreFull(f"There is no room in the state store at {location}.", next_step="Free some space.")
    if _DENIED.search(what):
        return _denied(location, what)
    return StoreUnavailable(f"The state store at {location} {what.rstrip('.')}.")


def _denied(location: str, what: str) -> InvalidLocation:
    return InvalidLocation(
        f"The state store at {location} may not be used by this process: {what.rstrip('.')}.",
        next_step="Grant it permission to read and write there; readers write too: they register what they read.",
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store lives: the objects of our own, and the database under them."""

    location: str
    objects: Any
    path: str
    url: str

    @classmethod
    def parse(cls, url: str, *, create: bool) -> Place:
        """From ``file:///path`` or ``s3://bucket/prefix?endpoint=…&region=…``.

        :raises InvalidLocation: anything else.
        """
        _loop.check_process()
        try:
            parts = urlsplit(url)
            options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            endpoint = urlsplit(options.get("endpoint", "http://none"))
        except ValueError as error:
            raise InvalidLocation("Received a location that is no URL.") from error
        if "@" in parts.netloc or "@" in endpoint.netloc:
            raise InvalidLocation(
                "Received a location with user information in it.",
                next_step="Give credentials in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.",
            )
        if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
            return cls._local(f"slatedb+file://{parts.path}", Path(unquote(parts.path)), url, create)
        if parts.scheme == "s3" and parts.netloc:
            unknown = set(options) - {"endpoint", "region"}
            if unknown:
                raise InvalidLocation(f"Received the option {min(unknown)!r}; valid are endpoint and region.")
            if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
                raise InvalidLocation("Received an endpoint that is no URL; valid is http://host:port or https://host.")
            config: Any = {key: value for key, value in options.items() if value}
            prefix = parts.path.strip("/")
            objects = S3Store(
                parts.netloc,
                prefix=prefix or None,
                config=config,
                client_options={
                    "allow_http": "endpoint" in options and endpoint.scheme == "http",
                    "timeout": timedelta(seconds=REQUEST_SECONDS),
                },
                retry_config={"max_retries": 10, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            )
            return cls(f"slatedb+{url}", objects, f"{prefix}/db".lstrip("/"), url)
        raise InvalidLocation("An object store is file:///path or s3://bucket/prefix.")

    @classmethod
    def _local(cls, location: str, root: Path, url: str, create: bool) -> Place:
        try:
            if create:
                make_root(root)
            check_private(root)
            objects = LocalStore(root, mkdir=create) if root.is_dir() else None
        except UnsafeDirectory:
            raise
        except (OSError, ValueError, obstore.exceptions.BaseError) as error:
            reason = getattr(error, "strerror", None) or "not a path"
            raise InvalidLocation(f"There cannot be a state store at {location!a}: {reason}.") from error
        return cls(location, objects, "db", url)

    def check_writable(self) -> None:
        """:raises InvalidLocation: this process may not write here. SlateDB would try for ever, without a word."""
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            if not os.access(Path(unquote(parts.path), "db", "manifest"), os.W_OK | os.X_OK):
                raise _denied(self.location, "it cannot be written")
            return
        probe = f"db/probe/{uuid.uuid4().hex}"
        self.write(probe, b"")
        self.delete(probe)

    def database_store(self) -> Any:
        """The object store as SlateDB wants it."""
        parts = urlsplit(self.url)
        if parts.scheme == "file":
            builder = slate.ObjectStoreBuilder(slate.ObjectStoreType.LOCAL)
            builder.with_config("local_path", unquote(parts.path))
            return builder.build()
        builder = slate.ObjectStoreBuilder.from_env(slate.ObjectStoreType.S3)
        builder.with_config("bucket", parts.netloc)
        for key, values in parse_qs(parts.query).items():
            builder.with_config(key, values[-1])
            if key == "endpoint" and values[-1].startswith("http://"):
                builder.with_config("allow_http", "true")
        return builder.build()

    # -- small objects of our own: owner records, pins ---------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        if self.objects is None:
            return None
        with map_errors(self.location):
            try:
                return bytes(obstore.get(self.objects, name).bytes())
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with map_errors(self.location):
            obstore.put(self.objects, name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Put-if-absent; ``False`` when the object exists with other bytes.

        Where the answer to a put is lost, the client tries again, and is refused by its own object.
        """
        with map_errors(self.location):
            try:
                obstore.put(self.objects, name, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return self.read(name) == data
        return True

    def names(self, prefix: str) -> list[str]:
        return list(self.entries(prefix))

    def entries(self, prefix: str) -> dict[str, str | None]:
        """The objects under *prefix*, in order of their names, with what tells one content from another (the ETag)."""
        if self.objects is None:
            return {}
        with map_errors(self.location):
            found = {meta["path"]: meta["e_tag"] for page in obstore.list(self.objects, prefix=prefix) for meta in page}
        return dict(sorted(found.items()))

    def delete(self, name: str) -> None:
        with map_errors(self.location):
            try:
                obstore.delete(self.objects, name)
            except FileNotFoundError:
                pass
