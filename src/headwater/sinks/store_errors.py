"""What the errors of object stores mean: no answer, or keys that are refused.

The libraries below a sink of files raise plain errors and put the reason into the text. Errors of the operating system
have a number and are left alone, as is everything that is not known here.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from headwater.errors import HeadwaterError
from headwater.sinks.errors import SinkLoginRefused, SinkUnreachable

F = TypeVar("F", bound=Callable[..., Any])

_REFUSED: Final = re.compile(
    r"\b40[13] (Forbidden|Unauthorized)|HTTP status 40[13]\b|HTTP response code 40[13]\b|Access ?Denied|ACCESS_DENIED"
    r"|InvalidAccessKeyId|INVALID_ACCESS_KEY_ID|SignatureDoesNotMatch|SIGNATURE_DOES_NOT_MATCH|ExpiredToken"
    r"|EXPIRED_TOKEN|InvalidToken|INVALID_CLIENT_TOKEN_ID|TokenRefreshRequired|Unauthenticated",
    re.IGNORECASE,
)
_NO_ANSWER: Final = re.compile(
    r"error sending request|operation timed out|HTTP error|error decoding response body|request or response body error"
    r"|non-2xx status code: (5\d\d|408|429)|\b(5\d\d) (Internal|Bad Gateway|Service|Gateway|Slow)|HTTP status 5\d\d\b"
    r"|HTTP response code 5\d\d\b|NETWORK_CONNECTION|curlCode|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE"
    r"|REQUEST_TIMEOUT|THROTTLING|DEADLINE_EXCEEDED|CURL error",
    re.IGNORECASE,
)
_ADDRESS: Final = re.compile(r"https?://[^\s/?#'\"<>]+")


def endpoint_of(options: Mapping[str, str]) -> str:
    """The server that *options* of an object store name; empty: none."""
    return next((value for name, value in options.items() if "endpoint" in name.lower()), "")


def store_error(error: BaseException, root: str, endpoint: str) -> HeadwaterError | None:
    """Our error for *error* of the object store that has *root*; ``None``: it is something else.

    :param endpoint: its server, if the error does not name one.
    """
    text = str(error)
    if isinstance(error, HeadwaterError) or getattr(error, "errno", None) is not None:
        return None
    refused = _REFUSED.search(text)
    if refused is None and not _NO_ANSWER.search(text):
        return None
    address = _ADDRESS.search(text)
    host = urlsplit(address[0] if address else endpoint).netloc.rpartition("@")[2]
    server = f"The object store at {host} ({root})" if host else f"The object store of {root}"
    if refused is not None:
        return SinkLoginRefused(
            f"{server} refused the keys: {refused[0]}.",
            next_step="Write valid keys to the options of the sink, or to the files that they name.",
        )
    return SinkUnreachable(
        f"{server} did not answer, or failed.",
        next_step="No action needed if it is back soon: the batch is tried again until the object store answers.",
    )


@contextmanager
def _named(sink: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found = store_error(error, *sink.object_store)
        if found is None:
            raise
        raise found from error


def names_store_errors(method: F) -> F:
    """A method of a sink of files, with the errors of its object store in our words."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _named(self):
            return method(self, *args, **kwargs)

    @functools.wraps(method)
    def yielding(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _named(self):
            yield from method(self, *args, **kwargs)

    return yielding if inspect.isgeneratorfunction(method) else wrapped  # type: ignore[return-value]
