"""Catalog of an Iceberg sink: which tables there are, and which metadata file each of them has now.

The embedded one is a SQLite file in the warehouse. Others are named by an address: ``http(s)://`` of a REST catalog, or
that of a SQL database. A catalog is opened once per process, and not taken along by a fork.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.sinks.errors import (
    SinkDriverMissing,
    SinkError,
    SinkInputError,
    SinkLoginRefused,
    SinkUnreachable,
    SinkUnwritable,
)
from headwater.sinks.storage import Storage, store_error
from headwater.sources.table import SourceTable
from headwater.sources.target_names import catalog_name, path_component

CATALOG_FILE: Final = "catalog.db"
BUSY_SECONDS: Final = 30
_FILES: Final = "headwater.sinks.iceberg_client.DurableFileIO"

_NO_CONNECTION: Final = re.compile(
    r"connection refused|could not connect|can't connect|timed? ?out|starting up|shutting down|database is locked"
    r"|server closed the connection|no route to host|could not translate host name|name resolution"
    r"|too many (clients|connections)",
    re.IGNORECASE,
)

_lock = threading.Lock()
_open: dict[tuple[Any, ...], tuple[IcebergCatalog, Any]] = {}


def iceberg_library() -> Any:
    """:raises SinkDriverMissing: it is not installed."""
    try:
        import pyiceberg.catalog
        import pyiceberg_core  # noqa: F401
        import sqlalchemy  # noqa: F401
    except ImportError as error:
        raise SinkDriverMissing(
            "An Iceberg sink needs the library pyiceberg.", next_step="Run: pip install 'headwater[iceberg]'"
        ) from error
    return pyiceberg


@dataclass(frozen=True)
class IcebergCatalog:
    """Where the catalog of *warehouse* is.

    :param name: of the catalog: a SQL catalog keeps tables by it. :param uri: its address; none for the embedded one.
    :param options: of the catalog and of the object store, in pyiceberg's names; they may hold passwords.
    """

    warehouse: str
    name: str
    uri: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_remote(self) -> bool:
        """It decides by itself where tables are."""
        return self.uri is not None and self.uri.startswith(("http://", "https://"))

    @property
    def label(self) -> str:
        """What it is called in messages, without a password."""
        if not self.is_remote:
            return "The Iceberg catalog"
        parsed = urlsplit(self.uri or "")
        return f"The Iceberg catalog at {parsed.scheme}://{parsed.netloc.rpartition('@')[2]}"

    def open(self) -> Any:
        """pyiceberg's catalog; another one once a secret changed. :raises SinkError: it cannot be reached."""
        iceberg_library()
        place = (os.getpid(), self.warehouse, self.name, self.uri, tuple(sorted(self.options)))
        with _lock:
            address, catalog = _open.get(place, (None, None))
        if address != self:
            with reaching(self.label):  # not under the lock: other catalogs do not wait for this one
                catalog = self._load()
            with _lock:
                _open[place] = (self, catalog)
        return catalog

    def _load(self) -> Any:
        from pyiceberg.catalog import load_catalog
        from sqlalchemy.exc import OperationalError

        properties = {"py-io-impl": _FILES, **self.options, "uri": self.uri or self._embedded()}
        if self.is_remote:
            from headwater.sinks.iceberg_client import load_rest_catalog

            return load_rest_catalog(self.name, properties)
        properties["warehouse"] = self.warehouse
        try:
            return load_catalog(self.name, **properties)
        except OperationalError:  # another process made its tables at the same time
            return load_catalog(self.name, **properties)

    def _embedded(self) -> str:
        from sqlalchemy import URL

        storage = Storage(self.warehouse)
        if not storage.is_local:
            raise SinkInputError(
                "The embedded Iceberg catalog is a file: it cannot be in an object store.",
                next_step="Give catalog_uri: the address of a REST catalog, or sqlite:///path/of/catalog.db.",
            )
        path = Path(storage.address)
        path.mkdir(parents=True, exist_ok=True)
        made = URL.create("sqlite", database=str(path / CATALOG_FILE), query={"timeout": str(BUSY_SECONDS)})
        return made.render_as_string(hide_password=False)

    def storage(self, *names: str) -> Storage:
        """A directory in the warehouse."""
        root = Storage(self.warehouse)
        if not root.is_local:
            iceberg_library()
            from headwater.sinks.iceberg_client import ObjectStorage

            root = ObjectStorage(self.warehouse, dict(self.options))
        return root.within(*names) if names else root

    def location(self, identifier: tuple[str, ...]) -> str | None:
        """Where a new table has to be; ``None``: the catalog says."""
        if self.is_remote:
            return None
        address = self.storage(*map(path_component, identifier)).address
        return f"file://{address}" if Storage(self.warehouse).is_local else address


def identifier_of(table: SourceTable, namespace: str | None) -> tuple[str, ...]:
    """The name of *table* in the catalog."""
    levels = (table.namespace or "default",) if namespace is None else tuple(namespace.split("."))
    return tuple(map(catalog_name, (*levels, table.name)))


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Errors of pyiceberg and of what is below it as ours, without what they tell of addresses and passwords.

    :raises SinkUnreachable: there was no answer. :raises SinkUnwritable: any other.
    """
    from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError

    try:
        yield
    except (SinkError, CommitFailedException, NoSuchTableError, TableAlreadyExistsError):
        raise
    except Exception as error:
        if _has_no_answer(error):
            raise SinkUnreachable(
                f"{what} did not answer: {type(error).__name__}.",
                next_step="Check that the catalog runs and answers. It is tried again.",
            ) from error
        if _is_refused(error):
            raise SinkLoginRefused(
                f"{what} refused the login: {type(error).__name__}.",
                next_step="Write a valid token or credential to catalog_options, or to the file that they name.",
            ) from error
        if store_error(error, what, "") is not None:
            raise  # the sink names its object store
        raise SinkUnwritable(
            f"{what} cannot be used: {type(error).__name__}.",
            next_step="Look at its address, at the rights of its user, and at the storage of the warehouse.",
        ) from error


def _is_refused(error: Exception) -> bool:
    from pyiceberg.exceptions import AuthorizationExpiredError, ForbiddenError, OAuthError, UnauthorizedError

    return isinstance(error, AuthorizationExpiredError | ForbiddenError | OAuthError | UnauthorizedError)


def _has_no_answer(error: Exception) -> bool:
    """Whether the catalog can have done what was asked, or will do it when it is asked again."""
    import requests
    from pyiceberg.exceptions import (
        CommitStateUnknownException,
        ServerError,
        ServiceUnavailableError,
        TooManyRequestsError,
    )
    from sqlalchemy.exc import DBAPIError

    if isinstance(error, DBAPIError):  # SQLAlchemy does not call it a lost connection where there never was one
        return error.connection_invalidated or _NO_CONNECTION.search(str(error.orig)) is not None
    answers = (CommitStateUnknownException, ServerError, ServiceUnavailableError, TooManyRequestsError)
    lost = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
    return isinstance(error, (*answers, *lost))
