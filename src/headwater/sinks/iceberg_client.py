"""Our own parts in place of those of pyiceberg: durable files, and catalogs whose requests end. Needs pyiceberg.

A catalog gets the name of a metadata file after it was written. If the file were not synced by then, a power cut could
leave a durable catalog that names a missing file. pyiceberg's REST client waits for an answer without end; here each
request is bounded.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import pyarrow.fs as pafs
import requests
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.io import InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.utils.config import Config, merge_config

from headwater.sinks.storage import Storage
from headwater.system.files import sync

METADATA_SUFFIX = ".metadata.json"


class DurableFileIO(PyArrowFileIO):
    """Like pyiceberg's own; local files are synced when they are closed."""

    def new_output(self, location: str) -> Any:
        scheme, _, path = self.parse_location(location, self.properties)
        return _LocalOutput(location, Path(path), self) if scheme == "file" else super().new_output(location)


class _LocalOutput(OutputFile):
    def __init__(self, location: str, path: Path, files: DurableFileIO) -> None:
        super().__init__(location)
        self._path = path
        self._files = files

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        return self._path.exists()

    def to_input_file(self) -> InputFile:
        return self._files.new_input(self.location)

    def create(self, overwrite: bool = False) -> Any:
        flags = "wb" if overwrite else "xb"
        try:
            return _Synced(self._path, flags)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return _Synced(self._path, flags)


class _Synced(io.BufferedWriter):
    """A new file. The newest metadata is written last: its directory is synced with it."""

    def __init__(self, path: Path, flags: str) -> None:
        super().__init__(path.open(flags, buffering=0))
        self._path = path

    def close(self) -> None:
        if self.closed:
            return
        self.flush()
        os.fsync(self.fileno())
        super().close()
        if self._path.name.endswith(METADATA_SUFFIX):
            sync(self._path.parent)


class ObjectStorage(Storage):
    """A directory in an object store, by pyiceberg's names of its options (``s3.endpoint`` …)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStorage, (self.root, self.options)

    def within(self, *names: str) -> Storage:
        return ObjectStorage("/".join((self.root.rstrip("/"), *names)), self.options)

    @property
    def files(self) -> Any:
        parsed = urlparse(self.root)
        found = PyArrowFileIO(dict(self.options)).fs_by_scheme(parsed.scheme, parsed.netloc)
        return pafs.SubTreeFileSystem(f"{parsed.netloc}{parsed.path}", found)

    def _upload(self, name: str, data: bytes) -> None:
        with self.files.open_output_stream(name) as stream:
            stream.write(data)


def storage_of(location: str, options: dict[str, str]) -> Storage:
    """The directory that a table's *location* names."""
    if location.startswith("file:"):
        return Storage(urlparse(location).path)
    return ObjectStorage(location, options) if "://" in location else Storage(location)


CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
"""How long the catalog may be silent."""


def _request(request: Callable[..., Any], method: str, url: str, **options: Any) -> Any:
    """A bounded *request*; a read whose connection was closed meanwhile, as idle ones are, is sent again."""
    bounded = partial(request, method, url, timeout=(CONNECT_SECONDS, ANSWER_SECONDS), **options)
    try:
        return bounded()
    except requests.ConnectionError:
        if method.upper() not in ("GET", "HEAD"):
            raise
        return bounded()


class BoundedRestCatalog(RestCatalog):
    """Like pyiceberg's own; a request to a catalog that says nothing fails."""

    def _config_headers(self, session: Any) -> None:
        """The first thing that is done with a new session, before a token is requested with it."""
        super()._config_headers(session)
        session.request = partial(_request, session.request)


def load_rest_catalog(name: str, properties: dict[str, str]) -> Any:
    """The catalog *name*, with the settings of pyiceberg's file and environment below *properties*."""
    settings: Any = merge_config(Config().get_catalog_config(name) or {}, dict(properties))
    if settings.get("type", "rest") != "rest" or "py-catalog-impl" in settings:
        return load_catalog(name, **properties)
    return BoundedRestCatalog(name, **settings)
