"""Which addresses are reached over a network without TLS being asked for. Pure: nothing is connected."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final

from headwater.databases.address import Url, host_of
from headwater.sources.diagnosis import Finding, Level
from headwater.sources.dsn import current_dsn

_FIXES: Final[Mapping[str, str]] = {
    "postgresql": "add ?sslmode=verify-full&sslrootcert=FILE to the connection string",
    "mysql": "add ?ssl_mode=VERIFY_IDENTITY&ssl_ca=FILE to the connection string",
    "mongodb": "add ?tls=true&tlsCAFile=FILE to the connection string",
    "sqlserver": "add ?cafile=FILE to the connection string",
    "http": "write https:// in the address",
    "kafka": 'set "security.protocol" to "SSL" or "SASL_SSL" in its options',
}
_ALIASES: Final = {"postgres": "postgresql", "citus": "postgresql", "mariadb": "mysql", "mssql": "sqlserver"}


def plain_finding(what: str, address: str) -> Finding | None:
    """A warning where *address* is beyond this machine and does not ask for TLS.

    :param what: of the pipeline, for the text. :param address: a URL, or the file that has it.
    """
    url = Url.parse(current_dsn(address), strict=False)
    kind = _ALIASES.get(url.scheme, url.scheme)
    options = {name.lower(): value for name, value in url.options.items()}
    if kind not in _FIXES or _asks_for_tls(kind, options) or "unix_socket" in options:
        return None
    hosts = [host_of(text) for text in url.hosts]
    if kind == "postgresql":
        hosts = options.get("host", "").split(",") if options.get("host") else hosts
    return finding(what, kind, hosts)


def finding(what: str, kind: str, hosts: list[str]) -> Finding | None:
    """The warning about a connection of *kind* without TLS; none if all *hosts* are this machine."""
    beyond = [host for host in hosts if not is_here(host)]
    if not beyond:
        return None
    text = f"{what}: the connection to {beyond[0]} does not have to be encrypted."
    return Finding("encryption", Level.WARNING, text, f"-- {_FIXES[kind]}")


def is_here(host: str) -> bool:
    """Whether *host* is this machine: a socket in the file system, or a loopback address."""
    if not host or host.startswith(("/", "@")) or host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _asks_for_tls(kind: str, options: Mapping[str, str]) -> bool:
    match kind:
        case "postgresql":
            return options.get("sslmode") in ("require", "verify-ca", "verify-full")
        case "mysql":
            mode = (options.get("ssl_mode") or options.get("ssl-mode") or "").upper()
            return mode in ("REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY") or (not mode and "ssl_ca" in options)
        case "mongodb":
            return "true" in (options.get("tls"), options.get("ssl")) or "tlscafile" in options
        case "sqlserver":
            return "cafile" in options
    return False
