"""WebhookSink: rows and changes as JSON lines, posted to a web server.

At least once, with a stable name: each request has the header ``Idempotency-Key``, ``<query>/<table>/<epoch>/<plan>``
and the number of the request if the batch takes several. A batch that is sent again after a crash is cut in the same
way and has the same keys, so that a server that keeps the keys takes each row once.

What answers 5xx, 408, 425 or 429, does not answer in time or cannot be reached is asked again, after a delay
that grows (:data:`BACKOFF`). Any other answer but 2xx is an error that is not retried here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection, responses
from typing import ClassVar, Final
from urllib.parse import quote, urlsplit

from headwater import failpoints
from headwater.databases.secret_files import current_options
from headwater.sinks.at_least_once import AtLeastOnceSink
from headwater.sinks.errors import SinkInputError, SinkLoginRefused, SinkUnreachable, SinkUnwritable
from headwater.sinks.json_rows import json_lines
from headwater.sinks.row_batch import RowBatch
from headwater.sinks.sink import Capabilities, Mode
from headwater.sources.table import SourceTable
from headwater.system.retry import Backoff

ROWS: Final = 1000
ATTEMPTS: Final = 6
TIMEOUT_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 120.0
"""A request is not sent again after this time: the batch is."""
BACKOFF: Final = Backoff(base=1, factor=2, maximum=30)
KEY_HEADER: Final = "Idempotency-Key"

AFTER_REQUEST = failpoints.register("sink.webhook.after_request")

_AGAIN: Final = frozenset({408, 425, 429})
_NO_LOGIN: Final = frozenset({401, 403})
_sleep = time.sleep


@dataclass(frozen=True, kw_only=True)
class WebhookSink(AtLeastOnceSink):
    """Requests to *url*, at least once.

    :param url: ``https://…``; it may hold a secret, and only its host is shown.
    :param headers: of each request, ``Authorization`` for example; never shown. A value ``file:/path`` is read from
        that file for each request.
    :param rows: of a request at most. :param attempts: of a request. :param timeout_seconds: for an answer.
    :raises SinkInputError: no address of a web server, or one with a password in it.
    """

    capabilities: ClassVar[Capabilities] = Capabilities((Mode.CHANGES, Mode.MIRROR), readable=False)

    url: str = field(repr=False)
    mode: Mode = Mode.CHANGES
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    rows: int = ROWS
    attempts: int = ATTEMPTS
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        parsed = urlsplit(self.url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise SinkInputError("A webhook needs an address of a web server.", next_step="Give url = 'https://…'.")
        if parsed.username is not None:
            raise SinkInputError(
                "The url of a webhook has a user in it.", next_step="Give an Authorization header in `headers` instead."
            )
        if self.rows < 1 or self.attempts < 1:
            raise SinkInputError("A webhook needs rows and attempts of 1 or more.", next_step="Leave them out.")

    @property
    def name(self) -> str:
        parsed = urlsplit(self.url)
        return f"webhook:{parsed.scheme}://{parsed.hostname}"

    def send(self, table: SourceTable, key: str, batch: RowBatch) -> None:
        """One request after the other.

        :raises SinkUnreachable: it did not answer, or failed each time. :raises SinkUnwritable: it refuses.
        """
        for number, lines in enumerate(json_lines(table, batch, self.rows)):
            body = "\n".join([*lines, ""]).encode()
            self._post(quote(key if number == 0 else f"{key}/{number}", safe="/~"), body)
            failpoints.hit(AFTER_REQUEST)

    def _post(self, key: str, body: bytes) -> None:
        failure, attempt = "", 0
        deadline = time.monotonic() + RETRY_SECONDS
        while attempt < self.attempts and (attempt == 0 or time.monotonic() < deadline):
            if attempt:
                _sleep(BACKOFF.delay(attempt))
            attempt += 1
            try:
                status = self._ask(key, body)
            except (OSError, HTTPException) as error:
                failure = f"did not answer ({type(error).__name__})"
                continue
            if 200 <= status < 300:
                return
            failure = f"answered {status} {responses.get(status, '')}".rstrip()
            if status in _NO_LOGIN:
                raise SinkLoginRefused(
                    f"{self.name} {failure}.",
                    next_step="Give valid `headers`, or write them to the files that they name.",
                )
            if status < 500 and status not in _AGAIN:
                raise SinkUnwritable(
                    f"{self.name} {failure}.", next_step="Look at url and headers of the sink, and at the server's log."
                )
        raise SinkUnreachable(
            f"The web server at {urlsplit(self.url).netloc} {failure}, {attempt} times.",
            next_step="Start the server; the batch is sent again.",
        )

    def _ask(self, key: str, body: bytes) -> int:
        parsed = urlsplit(self.url)
        kind = HTTPSConnection if parsed.scheme == "https" else HTTPConnection
        connection = kind(parsed.hostname or "", parsed.port, timeout=self.timeout_seconds)
        target = (parsed.path or "/") + (f"?{parsed.query}" if parsed.query else "")
        own = {"Content-Type": "application/x-ndjson", "User-Agent": "headwater", KEY_HEADER: key}
        try:
            connection.request("POST", target, body, {**current_options(self.headers), **own})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()
