"""From what a pipeline names to the tables of its database."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headwater.capture import CapturedTable, SourceRecord, SourceState
from headwater.errors import TransientError
from headwater.pipeline.config import PipelineConfig, is_pattern, matching
from headwater.pipeline.errors import ConfigError
from headwater.sources.errors import SourceNotFound, UnsupportedTable
from headwater.sources.offset import CdcOffset
from headwater.sources.open import all_tables, full_name, open_source
from headwater.state import open_reader
from headwater.state.errors import StoreNotFound

_NAMES: Final = 10


@dataclass(frozen=True, slots=True)
class ChosenTables:
    """The full names of the tables of a pipeline.

    :ivar left_out: tables that a pattern stands for and that cannot be captured, with the reason and what mends it.
    """

    names: tuple[str, ...]
    left_out: dict[str, tuple[str, str | None]]


def choose_tables(config: PipelineConfig) -> ChosenTables:
    """The tables that *config* names; patterns are looked up in the database.

    A pattern stands for what is there now; while the database does not answer, for what is captured already.

    :raises ConfigError: no table at all. :raises TransientError: the database does not answer, and nothing is known.
    """
    wanted = config.source.tables
    plain = [full_name(config.dsn, name) for name in wanted if not is_pattern(name)]
    patterns = [name for name in wanted if is_pattern(name)]
    left_out: dict[str, tuple[str, str | None]] = {}
    found: list[str] = []
    there: list[str] = []
    if patterns:
        try:
            found, left_out, there = _at_the_source(config, patterns, plain)
        except TransientError:
            found = matching(patterns, list(captured_tables(config.store)), config.home)
            if not found:
                raise
    names = tuple(dict.fromkeys([*plain, *found]))
    if not names:
        raise ConfigError(
            f"[source] tables: nothing in the database is called {', '.join(patterns)}"
            f"{' and can be captured' if left_out else ''}.",
            key="source.tables",
            next_step=_instead(patterns, left_out, there),
        )
    return ChosenTables(names, left_out)


def captured_tables(store: str) -> dict[str, CapturedTable]:
    """The tables whose logs are in the store at *store*, by name."""
    return _captured(store)[1]


def captured_position(store: str) -> CdcOffset | None:
    """Up to where the source was captured into the store at *store*; ``None``: it was not."""
    record = _captured(store)[0]
    return None if record is None else record.offset


def _captured(store: str) -> tuple[SourceRecord | None, dict[str, CapturedTable]]:
    try:
        with open_reader(store) as reader, reader.snapshot() as view:
            return SourceState.read(view)
    except StoreNotFound:
        return None, {}


def _instead(patterns: list[str], left_out: Mapping[str, tuple[str, str | None]], there: list[str]) -> str:
    """What to do where the patterns stand for nothing."""
    for name, (reason, step) in left_out.items():
        return f"{name}: {reason}{'' if step is None else f' {step}'}"
    if not there:
        return "The database has no tables: look whether it is the right one."
    everything = [f"{schema}.*" for schema in dict.fromkeys(name.rpartition(".")[0] for name in there)]
    near = difflib.get_close_matches(patterns[0], [*everything, *there], 1)
    return f"Did you mean {near[0]}?" if near else f"Its tables are in {', '.join(everything[:_NAMES])}."


def _at_the_source(
    config: PipelineConfig, patterns: list[str], plain: list[str]
) -> tuple[list[str], dict[str, tuple[str, str | None]], list[str]]:
    """The tables that *patterns* stand for, those of them that are left out, and all that there are."""
    names = all_tables(config.dsn)
    found: list[str] = []
    left_out: dict[str, tuple[str, str | None]] = {}
    source = open_source(
        config.dsn, spill=config.work / "spill", special_values=config.special_values, columns=config.columns
    )
    try:
        for name in matching(patterns, names, config.home):
            try:
                if name not in plain:
                    source.tables([name])
                found.append(name)
            except UnsupportedTable as error:
                left_out[name] = (error.reason, error.next_step)
            except SourceNotFound as error:
                left_out[name] = (error.message, None)
    finally:
        source.close()
    return found, left_out, names
