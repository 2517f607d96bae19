"""REST catalogs of Iceberg whose requests end: pyiceberg's client waits for an answer without end. Needs pyiceberg."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.utils.config import Config, merge_config

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
"""How long the catalog may be silent."""


class BoundedRestCatalog(RestCatalog):
    """Like pyiceberg's own; a request to a catalog that says nothing fails."""

    def _config_headers(self, session: Any) -> None:
        """The first thing that is done with a new session, before a token is requested with it."""
        super()._config_headers(session)
        session.request = partial(session.request, timeout=(CONNECT_SECONDS, ANSWER_SECONDS))


def load_rest_catalog(name: str, properties: dict[str, str]) -> Any:
    """The catalog *name*, with the settings of pyiceberg's file and environment below *properties*."""
    settings: Any = merge_config(Config().get_catalog_config(name) or {}, dict(properties))
    if settings.get("type", "rest") != "rest" or "py-catalog-impl" in settings:
        return load_catalog(name, **properties)
    return BoundedRestCatalog(name, **settings)
