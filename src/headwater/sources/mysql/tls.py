"""TLS of a connection to MySQL or MariaDB, as its URL asks for it.

``ssl_mode`` has the words of MySQL's own clients. A mode that is given is kept: a server without TLS, or one whose
certificate does not pass, is refused before the password is sent.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

from headwater.sources.errors import InvalidDsn

OPTIONS: Final = frozenset(("ssl_ca", "ssl_mode", "ssl-mode"))
"""The options of a URL that are read here."""
MODES: Final = ("DISABLED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")


def parameters(options: Mapping[str, str]) -> dict[str, Any]:
    """What the library is given; nothing where the URL does not ask: it encrypts if the server can, unverified.

    :raises InvalidDsn: the file of certificates cannot be read.
    """
    authority, mode = options.get("ssl_ca"), check_mode(options)
    if not mode:
        return {}
    if mode == "DISABLED":
        return {"ssl_disabled": True}
    if mode == "REQUIRED":
        return {"ssl": {"verify_mode": "none"}}
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise InvalidDsn(
            f"The certificates in {authority} cannot be read: {error.strerror or type(error).__name__}.",
            next_step="Set ssl_ca to a file of PEM certificates.",
        ) from None
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # certificates that the servers generate do not pass it
    context.check_hostname = mode == "VERIFY_IDENTITY"
    return {"ssl": context}


def check_mode(options: Mapping[str, str]) -> str:
    """The mode that *options* ask for; empty where they do not. :raises ValueError: there is no such mode."""
    default = "VERIFY_IDENTITY" if "ssl_ca" in options else ""
    mode = (options.get("ssl_mode") or options.get("ssl-mode") or default).upper()
    if mode and mode not in MODES:
        raise ValueError(mode)
    return mode


def is_refusal(said: str) -> bool:
    """Whether we refused the server: it has no TLS, or its certificate does not pass."""
    return "certificate" in said.lower() or "SSL is required" in said
