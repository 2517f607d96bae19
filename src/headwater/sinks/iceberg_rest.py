"""REST catalogs of Iceberg whose requests end: pyiceberg's client waits for an answer without end. Needs pyiceberg."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import requests
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.utils.config import Config, merge_config

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
