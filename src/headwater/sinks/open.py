"""Open a sink by the name of its kind, as a configuration has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkInputError
from headwater.sinks.parquet import ParquetSink
from headwater.sinks.sink import Mode, Sink

_KINDS: Mapping[str, Callable[..., Sink]] = {"delta": DeltaSink, "parquet": ParquetSink}


def open_sink(kind: str, **options: Any) -> Sink:
    """The sink of *kind*; nothing is connected or written yet.

    :param options: ``path``, ``mode`` (``mirror`` or ``changes``) and what the kind has more.
    :raises SinkInputError: an unknown kind, mode or option, or one that is missing.
    """
    if kind not in _KINDS:
        raise SinkInputError(f"Received sink kind {kind!r}; valid values are {', '.join(sorted(_KINDS))}.")
    if "mode" in options and not isinstance(options["mode"], Mode):
        options["mode"] = _mode(options["mode"])
    try:
        return _KINDS[kind](**options)
    except TypeError as error:
        raise SinkInputError(
            f"Received options for sink kind {kind!r} that it does not have, or not all that it needs: "
            f"{', '.join(sorted(options)) or 'none'}.",
            next_step="Give at least a path; docs/sinks.md lists the options.",
        ) from error


def _mode(text: object) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        valid = ", ".join(mode.value for mode in Mode)
        raise SinkInputError(f"Received sink mode {text!r}; valid values are {valid}.") from None
