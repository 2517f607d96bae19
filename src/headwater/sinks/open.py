"""Open a sink by the name of its kind, as a configuration has it.

A kind is one of ours, or ``module:Class`` of a sink of your own. The parameters of its class are its options: checked
by their types, unknown ones refused with the nearest that is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, cast

from headwater.sinks.errors import SinkInputError
from headwater.sinks.sink import Mode, Sink

KINDS: Final[Mapping[str, str]] = {
    "console": "headwater.sinks.console:ConsoleSink",
    "delta": "headwater.sinks.delta:DeltaSink",
    "iceberg": "headwater.sinks.iceberg:IcebergSink",
    "kafka": "headwater.sinks.kafka:KafkaSink",
    "mysql": "headwater.sinks.mysql:MySqlSink",
    "parquet": "headwater.sinks.parquet:ParquetSink",
    "postgres": "headwater.sinks.postgres:PostgresSink",
    "table": "headwater.sinks.kept_tables:KeptTables",
    "webhook": "headwater.sinks.webhook:WebhookSink",
}
"""Our own kinds, and the classes behind them."""


class SinkOptionError(SinkInputError):
    """An option that the kind of sink does not have, lacks, or cannot use.

    :ivar option: its name.
    """

    def __init__(self, message: str, *, option: str, next_step: str | None = None) -> None:
        self.option = option
        super().__init__(message, next_step=next_step)


@lru_cache
def sink_class(kind: str) -> type[Any]:
    """The class of sinks of *kind*. :raises SinkInputError: there is none."""
    module, colon, name = KINDS.get(kind, kind).partition(":")
    if not colon:
        near = difflib.get_close_matches(kind, KINDS, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise SinkInputError(
            f"Received sink kind {kind!r}; valid values are {', '.join(sorted(KINDS))}, or module:Class.",
            next_step=f"{hint}A sink of your own is named by its module and class, for example my_sinks:QueueSink.",
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SinkInputError(
            f"The sink kind {kind!r} cannot be imported: {error}.",
            next_step="Put its module where Python finds it, also on the executors.",
        ) from error
    if not is_dataclass(found) or not isinstance(found, type) or not hasattr(found, "capabilities"):
        raise SinkInputError(
            f"{kind} is no sink: it has to be a dataclass with capabilities.",
            next_step="docs/sinks.md shows one.",
        )
    return found


def option_names(kind: str) -> dict[str, bool]:
    """The options of *kind*, and whether each must be given."""
    return {
        one.name: one.default is MISSING and one.default_factory is MISSING
        for one in fields(sink_class(kind))
        if one.init
    }


def secret_options(kind: str) -> frozenset[str]:
    """Those whose values are never shown."""
    return frozenset(one.name for one in fields(sink_class(kind)) if not one.repr)


def default_mode(kind: str) -> Mode:
    """The mode that a sink of *kind* has when nobody says."""
    modes: tuple[Mode, ...] = sink_class(kind).capabilities.modes
    return modes[0]


def open_sink(kind: str, **options: Any) -> Sink:
    """The sink of *kind*; nothing is connected or written yet.

    :param options: the parameters of its class; ``mode`` as text or as :class:`Mode`.
    :raises SinkOptionError: an option that it does not have, lacks, or cannot use. :raises SinkInputError: an unknown
        kind, or options that contradict each other.
    """
    found = sink_class(kind)
    names = option_names(kind)
    for option in options:
        if option not in names:
            near = difflib.get_close_matches(option, names, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise SinkOptionError(
                f"Sinks of kind {kind!r} have no option {option!r}.",
                option=option,
                next_step=f"{hint}Valid are {', '.join(sorted(names))}.",
            )
    missing = [name for name, is_needed in names.items() if is_needed and name not in options]
    if missing:
        raise SinkOptionError(
            f"A sink of kind {kind!r} needs {missing[0]}.",
            option=missing[0],
            next_step=f"Give at least {', '.join(name for name, is_needed in names.items() if is_needed)}.",
        )
    if "mode" in options:
        options["mode"] = _mode(kind, found, options["mode"])
    return _checked(kind, found, options)


def _checked(kind: str, found: type[Any], options: dict[str, Any]) -> Sink:
    from pydantic import TypeAdapter, ValidationError  # here: tasks use sinks, and open none
    from pydantic.errors import PydanticUserError

    try:
        return cast(Sink, TypeAdapter(found).validate_python(options))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        option = str(first["loc"][0]) if first["loc"] else "options"
        raise SinkOptionError(
            f"The option {option} of a sink of kind {kind!r} is wrong: {first['msg'][:1].lower()}{first['msg'][1:]}.",
            option=option,
            next_step="docs/sinks.md lists the options.",
        ) from None
    except PydanticUserError as error:
        raise SinkInputError(
            f"The options of {kind} cannot be checked: {str(error).splitlines()[0]}",
            next_step="Its parameters have to be texts, numbers, booleans, enums, or arrays and tables of them.",
        ) from None


def _mode(kind: str, found: type[Any], mode: object) -> Mode:
    modes: tuple[Mode, ...] = found.capabilities.modes
    try:
        wanted = Mode(mode)
    except ValueError:
        wanted = None
    if wanted not in modes:
        shown = mode.value if isinstance(mode, Mode) else mode
        raise SinkOptionError(
            f"Received mode {shown!r} for a sink of kind {kind!r}; valid values are "
            f"{', '.join(one.value for one in modes)}.",
            option="mode",
            next_step="Leave it out, or use one of these.",
        )
    return wanted
