"""From what a pipeline names to the tables of its database."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from headwater.capture import CapturedTable, SourceRecord, SourceState, TableState
from headwater.errors import TransientError
from headwater.pipeline.config import PipelineConfig, SinkSection, is_pattern, matching
from headwater.pipeline.errors import ConfigError
from headwater.sources.errors import SourceNotFound, UnsupportedTable
from headwater.sources.offset import CdcOffset
from headwater.sources.open import all_tables, full_name, open_source
from headwater.sources.source import Source
from headwater.spark.capture_child import CaptureSettings
from headwater.state import open_reader
from headwater.state.errors import StoreNotFound

_NAMES: Final = 10
_WAIT_SECONDS: Final = 0.2
_SCHEMA: Final = re.compile(r'"(?:[^"]|"")*"|[^".]+')


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

    :raises ConfigError: a pattern matches no table, or no table can be captured.
    :raises TransientError: the database does not answer, and nothing is known.
    """
    wanted = config.source.tables
    plain = [full_name(config.dsn, name) for name in wanted if not is_pattern(name)]
    patterns = [name for name in wanted if is_pattern(name)]
    left_out: dict[str, tuple[str, str | None]] = {}
    found: list[str] = []
    if patterns:
        try:
            found, left_out, there = _at_the_source(config, patterns, plain)
            _refuse_unmatched(config, "source.tables", "[source]", patterns, there)
        except TransientError:
            found = matching(patterns, list(captured_tables(config.store)), config.home)
            if not found:
                raise
    names = tuple(dict.fromkeys([*plain, *found]))
    if not names:
        step = next((f"{name}: {why}{f' {step}' if step else ''}" for name, (why, step) in left_out.items()), None)
        raise ConfigError(
            f"[source] tables: no table that matches {', '.join(patterns)} can be captured.",
            key="source.tables",
            next_step=step,
        )
    return ChosenTables(names, left_out)


def sink_tables(
    config: PipelineConfig, section: SinkSection, names: Sequence[str], left_out: Iterable[str]
) -> list[str]:
    """Those of the tables *names* that a sink takes.

    :raises ConfigError: one of its patterns matches none, or all that match are left out.
    """
    _refuse_unmatched(config, "sink.tables", f"[[sink]] {section.label}", section.tables, [*names, *left_out])
    taken = matching(section.tables, names, config.home)
    if not taken:
        raise ConfigError(
            f"The sink {section.label!r} takes none of the tables: {', '.join(section.tables)}.",
            key="sink.tables",
            next_step=f"The pipeline has {', '.join(names)}.",
        )
    return taken


def source_of(config: PipelineConfig) -> Source:
    """The source of the pipeline; nothing is connected yet."""
    return open_source(
        config.dsn, spill=config.work / "spill", special_values=config.special_values, columns=config.columns
    )


def capture_settings(config: PipelineConfig, names: Sequence[str], captured: CapturedTables) -> CaptureSettings | None:
    """Of a capture of the tables *names* that is killed with this process; ``None``: *captured* is not known yet.

    A table that has stopped waits for a person, and does not keep the others from starting.
    """
    known, source = captured.poll(), config.source
    if known is None:
        return None
    return CaptureSettings(
        config.dsn,
        config.store,
        str(config.work / "spill"),
        [name for name in names if name not in known or known[name].state is TableState.ACTIVE],
        slot=source.slot,
        publication=source.publication,
        poll=source.poll,
        special_values=config.special_values,
        columns=config.columns,
        timeout_seconds=source.timeout_seconds,
        options=config.capture_options,
        parent=os.getpid(),
    )


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


class CapturedTables:
    """Reads :func:`captured_tables` in another thread: a store that does not answer blocks no caller. One thread."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._read: Future[dict[str, CapturedTable]] | None = None

    def poll(self) -> dict[str, CapturedTable] | None:
        """As they are now; ``None``: it takes longer than a moment, ask again. :raises StateError: as it says."""
        if self._read is None:
            self._read = Future()
            threading.Thread(target=self._run, args=(self._read,), name="headwater-tables", daemon=True).start()
        wait([self._read], _WAIT_SECONDS)
        if not self._read.done():
            return None
        read, self._read = self._read, None
        return read.result()

    def _run(self, read: Future[dict[str, CapturedTable]]) -> None:
        try:
            read.set_result(captured_tables(self._store))
        except BaseException as error:
            read.set_exception(error)


def _refuse_unmatched(
    config: PipelineConfig, key: str, section: str, patterns: Sequence[str], there: Sequence[str]
) -> None:
    """:raises ConfigError: one of *patterns* matches none of the tables that are there, nor one captured earlier."""
    unmatched = [one for one in patterns if not matching([one], there, config.home)]
    if unmatched:  # the tables of a pattern that were captured and dropped since are no reason to stop the others
        captured = list(captured_tables(config.store))
        unmatched = [one for one in unmatched if not matching([one], captured, config.home)]
    if unmatched:
        raise ConfigError(
            f"{section} tables: no table matches {', '.join(unmatched)}.",
            key=key,
            next_step=_instead(unmatched[0], there, config.home),
        )


def _instead(pattern: str, there: Sequence[str], home: str) -> str:
    """What to write for a pattern that matches none of the tables that are there."""
    if not there:
        return "The database has no tables: look whether it is the right one."
    for wider in (pattern, f"{home}.{pattern}"):
        if matching([wider], there, home):
            return f"Write {_in_toml(wider)}."
        meant = [name for name in there if fnmatchcase(_bare(name), _bare(wider))]
        if meant:
            schemas = [one for one in _schemas(meant) if wider.endswith(".*") and matching([one], there, home)]
            offered = ", ".join(_in_toml(one) for one in (schemas or meant)[:_NAMES])
            return f"Write {offered}: names with capitals or blanks are in double quotes, and case counts."
    everything = _schemas(there)
    near = difflib.get_close_matches(pattern, [*everything, *there], 1)
    if near:
        return f"Did you mean {_in_toml(near[0])}?"
    return f"Its tables are in {', '.join(_in_toml(one) for one in everything[:_NAMES])}."


def _schemas(names: Sequence[str]) -> list[str]:
    """For each schema or database of *names*, the pattern of all its tables."""
    found = (_SCHEMA.match(name) for name in names)
    return list(dict.fromkeys(f"{one.group()}.*" for one in found if one is not None))


def _bare(name: str) -> str:
    return name.replace('"', "").replace("`", "").lower()


def _in_toml(name: str) -> str:
    """*name* as the settings want it: a text with double quotes in it is in single ones."""
    return f"'{name}'" if '"' in name else f'"{name}"'


def _at_the_source(
    config: PipelineConfig, patterns: list[str], plain: list[str]
) -> tuple[list[str], dict[str, tuple[str, str | None]], list[str]]:
    """The tables that *patterns* stand for, those of them that are left out, and all that there are."""
    names = all_tables(config.dsn)
    found: list[str] = []
    left_out: dict[str, tuple[str, str | None]] = {}
    source = source_of(config)
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
