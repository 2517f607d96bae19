"""The sinks of a pipeline: one more, and the rows that one refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.backfill.log_ranges import described_tables
from headwater.control.command import ResnapshotTable
from headwater.control.request import ask_query
from headwater.pipeline.commands import ANSWER_SECONDS, announce, is_running
from headwater.pipeline.config import DeriveSection, PipelineConfig, SinkSection, configure, load
from headwater.pipeline.errors import ConfigError, NotStarted
from headwater.pipeline.toml_text import with_table
from headwater.sinks.dead_letters import DeadLetters
from headwater.sources.target_names import table_of_directory
from headwater.system.files import replace_file

_MANY_KEYS = 100
"""Above so many keys the whole table is read once more."""


def dead_letters(config: PipelineConfig, label: str) -> dict[str, pa.Table]:
    """The rows that the sink *label* refused and that were parked, with the reasons, by the name of their table.

    :raises ConfigError: there is no such sink.
    """
    letters = _dead_letters(config, _section(config, label))
    return {_table_of(directory): letters.rows(directory) for directory in letters.tables()}


def _dead_letters(config: PipelineConfig, section: SinkSection) -> DeadLetters:
    return DeadLetters(str(config.dead_letters(section)))


def _table_of(directory: str) -> str:
    """The table of a directory of dead letters, where its name says it."""
    return ".".join(part for part in table_of_directory(directory) or (directory,) if part)


def replay(config: PipelineConfig, label: str) -> dict[str, int]:
    """Read the rows once more that the sink *label* refused, as they are now; how many of each table.

    :raises NotStarted: the pipeline does not run.
    """
    section = _section(config, label)
    if not is_running(config):
        raise NotStarted("The pipeline is not running.", next_step="Start it: headwater run")
    letters = _dead_letters(config, section)
    query = config.query(section)
    tables = {letters.directory_of(table): table for table in described_tables(config.store)}
    done: dict[str, int] = {}
    for directory in letters.tables():
        table = tables.get(directory)
        rows = letters.rows(directory)
        if table is None or not rows.num_rows:
            continue
        keys = rows.select(list(table.key_columns)).group_by(list(table.key_columns)).aggregate([]).to_pylist()
        for key in _ranges([tuple(str(key[name]) for name in table.key_columns) for key in keys]):
            ask_query(config.state, query, ResnapshotTable(table.full_name, key, key), ANSWER_SECONDS)
        letters.put_away(directory)
        done[table.full_name] = rows.num_rows
    return done


def _ranges(keys: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Each of a few keys; one without values, which is the whole table, for many."""
    return [()] if len(keys) > _MANY_KEYS else keys


def _section(config: PipelineConfig, label: str) -> SinkSection:
    section = next((one for one in config.sink if one.label == label), None)
    if section is None:
        known = ", ".join(one.label for one in config.parts)
        raise ConfigError(f"The pipeline has no sink {label!r}.", key="sink", next_step=f"It has {known}.")
    return section


def add_sink(path: Path, kind: str, options: Mapping[str, Any]) -> SinkSection:
    """Write one more ``[[sink]]`` to the pipeline at *path*; a process that runs it begins to deliver there.

    :raises ConfigError: it cannot be used, or there is one of that name; the file stays as it was.
    """
    return _add(path, "sink", {"kind": kind, **options}).sink[-1]


def add_derivation(path: Path, options: Mapping[str, Any]) -> DeriveSection:
    """Write one more ``[[derive]]`` to the pipeline at *path*; a process that runs it begins to derive.

    :raises ConfigError: it cannot be used, or there is one of that name; the file stays as it was.
    """
    return _add(path, "derive", options).derive[-1]


def _add(path: Path, table: str, options: Mapping[str, Any]) -> PipelineConfig:
    load(path)
    try:
        text = with_table(path.read_text(encoding="utf-8"), table, options)
        settings = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"With these options it is no TOML: {error}.", next_step="Check the names.") from None
    config = configure(settings, folder=path.absolute().parent, origin=str(path), text=text)
    replace_file(path, text)  # it can hold a password: it stays as private as it was
    section = config.sink[-1] if table == "sink" else config.derive[-1]
    announce(config, section.label)
    return config
