"""From a URL to a store.

==================================  ======================================================================
URL                                 engine
==================================  ======================================================================
``memory://name``                   memory: shared by the handles of this process
``/path``, ``file:///path``         embedded (LMDB): a directory on a local disk; the default
``slatedb+file:///path``            object store (SlateDB) in a local directory
``slatedb+s3://bucket/prefix``      object store on S3 or a compatible server; ``?endpoint=http://…``,
                                    ``&region=…``; credentials from the environment
==================================  ======================================================================
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headwater.state.errors import InvalidLocation
from headwater.state.store import StateReader, StateStore

_SCHEMES = ("memory", "file", "slatedb+file", "slatedb+s3")
_VALID = "memory://name, /path, file:///path, slatedb+file:///path, slatedb+s3://bucket/prefix"


def open_writer(location: str | os.PathLike[str], *, takeover: bool = False) -> StateStore:
    """Open the store at *location* for writing; made when it does not exist.

    :param takeover: fence the live writer, if there is one, instead of being refused.
    :raises StoreOwned: a live writer has the store.
    :raises InvalidLocation: not a place for a store.
    """
    engine, rest = split_location(location)
    if engine == "memory":
        from headwater.state.engines.memory import open_memory_writer

        return open_memory_writer(rest, takeover=takeover)
    if engine == "slatedb":
        from headwater.state.engines.object_store import open_object_writer

        return open_object_writer(rest, takeover=takeover)
    from headwater.state.engines.embedded import open_embedded_writer

    return open_embedded_writer(Path(rest), takeover=takeover)


def open_reader(location: str | os.PathLike[str]) -> StateReader:
    """Open the store at *location* for reading, in any process.

    :raises StoreNotFound: there is no store.
    :raises InvalidLocation: not a place for a store.
    """
    engine, rest = split_location(location)
    if engine == "memory":
        from headwater.state.engines.memory import open_memory_reader

        return open_memory_reader(rest)
    if engine == "slatedb":
        from headwater.state.engines.object_store import open_object_reader

        return open_object_reader(rest)
    from headwater.state.engines.embedded import open_embedded_reader

    return open_embedded_reader(Path(rest))


def local_folder(location: str | os.PathLike[str]) -> Path | None:
    """The directory of the store at *location*; ``None``: it is in memory or in a bucket."""
    engine, rest = split_location(location)
    if engine == "embedded":
        return Path(rest)
    url = urlsplit(rest)
    return Path(unquote(url.path)) if engine == "slatedb" and url.scheme == "file" else None


def identity(location: str) -> str:
    """The same text for each spelling of *location*."""
    engine, rest = split_location(location)
    return f"{engine}:{Path(rest).resolve() if engine == 'embedded' else rest}"


def split_location(location: str | os.PathLike[str]) -> tuple[str, str]:
    """The engine, and what it needs to know."""
    text = os.fspath(location)
    if "://" not in text:
        if not text or text.partition(":")[0] in _SCHEMES:
            raise InvalidLocation(f"Received no usable location; valid are {_VALID}.")
        return "embedded", text
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidLocation(f"Received a location that is not a URL; valid are {_VALID}.") from error
    if parts.scheme == "memory" and (parts.netloc or parts.path):
        return "memory", parts.netloc + parts.path
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return "embedded", unquote(parts.path)
    if parts.scheme in ("slatedb+file", "slatedb+s3") and len(parts.netloc + parts.path) > 1:
        return "slatedb", text.removeprefix("slatedb+")
    # the URL may hold a password: name the scheme only
    raise InvalidLocation(f"Received a location with scheme {parts.scheme!r}; valid are {_VALID}.")
