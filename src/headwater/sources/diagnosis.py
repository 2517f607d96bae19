"""What a doctor found at a source: each finding with what mends it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from headwater.databases.address import Url, host_of
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


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # good to know
    WARNING = "warning"  # works now, and may stop or slow down
    PROBLEM = "problem"  # capture cannot start, or would miss changes


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    :ivar check: what, in one or two words, the same in every run.
    :ivar table: the table that it is about, if it is about one.
    :ivar fix: the statement that mends it; what is no statement begins with ``--``.
    """

    check: str
    level: Level
    text: str
    fix: str | None = None
    table: str | None = None


def statement_of(next_step: str | None) -> str | None:
    """The *fix* of a finding, from the next step of an error."""
    if next_step is None:
        return None
    return next_step.removeprefix("Run: ") if next_step.startswith("Run: ") else f"-- {next_step}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about one source.

    :ivar source: its address without the password.
    """

    source: str
    version: str | None
    findings: Sequence[Finding] = field(default_factory=tuple)

    @property
    def is_healthy(self) -> bool:
        """No finding is a problem."""
        return all(finding.level is not Level.PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        findings = [
            {
                "check": finding.check,
                "level": finding.level.value,
                "table": finding.table,
                "text": finding.text,
                "fix": finding.fix,
            }
            for finding in self.findings
        ]
        return {"source": self.source, "version": self.version, "healthy": self.is_healthy, "findings": findings}
