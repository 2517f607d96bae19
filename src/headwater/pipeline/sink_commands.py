"""What a person asks of the sinks of a pipeline: done by the process that runs it, or here when none does."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from headwater.backfill.control import RESNAPSHOT, ask_query
from headwater.backfill.log_ranges import described_tables
from headwater.journal.errors import OwnedElsewhereError
from headwater.journal.owner import OwnerLock, current_owner
from headwater.pipeline.config import DeriveSection, PipelineConfig, SinkSection, configure, load
from headwater.pipeline.derived_query import cannot_rewind, forget_derived
from headwater.pipeline.errors import ConfigError, NotStarted
from headwater.pipeline.sink_control import DesiredState, SinkControl, SinkRequest, SinkRequestKind, ask_pipeline
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.pipeline.supervision import LOCK_FILE, RUN_FOLDER, make_folders
from headwater.pipeline.toml_text import with_table
from headwater.sinks.dead_letters import DeadLetters
from headwater.system.files import replace_file

ANSWER_SECONDS = 180.0
_MANY_KEYS = 100
"""Above so many keys the whole table is read once more."""


def ask_sink(config: PipelineConfig, label: str, kind: SinkRequestKind, epoch: int | None = None) -> dict[str, Any]:
    """Ask it of the sink *label*, and wait until it is done.

    :raises ConfigError: there is no such sink. :raises RequestFailed: it cannot be done.
    """
    section = next((one for one in config.derive if one.label == label), None) or _section(config, label)
    request = SinkRequest(label, kind, epoch)
    lock = config.work / RUN_FOLDER / LOCK_FILE
    if current_owner(lock) is None:
        make_folders(config)
        try:
            with OwnerLock(lock, str(config.work)), closing(SinkControl(config.state)) as control:
                return _do(config, section, request, control)
        except OwnedElsewhereError:
            pass  # it was started just now
    return ask_pipeline(config.state, request, ANSWER_SECONDS)


def _do(
    config: PipelineConfig, section: SinkSection | DeriveSection, request: SinkRequest, control: SinkControl
) -> dict[str, Any]:
    is_dropped = control.desired_state(section.label) is DesiredState.DROPPED
    match request.kind:
        case SinkRequestKind.PAUSE:
            if is_dropped:
                return {"state": "dropped"}
            control.set_desired_state(section.label, DesiredState.PAUSED)
            return {"state": "paused"}
        case SinkRequestKind.RESUME:
            if is_dropped:  # a process that died may have left something
                _forget(config, section)
            control.set_desired_state(section.label, DesiredState.RUNNING)
            return {"state": "not running"}
        case SinkRequestKind.RETRY:
            tables: list[str] = []
            if isinstance(section, SinkSection):
                tables = let_back(config.store, config.state, config.query(section))
            return {"state": "not running", "tables": tables}
        case SinkRequestKind.REWIND:
            if isinstance(section, DeriveSection):
                raise cannot_rewind(section.label)
            return rewind_sink(config, section, request.epoch)
        case SinkRequestKind.DROP:
            control.set_desired_state(section.label, DesiredState.DROPPED)
            return {"tables": _forget(config, section)}
    raise NotStarted("The pipeline is not running.", next_step="Start it: headwater run")


def _forget(config: PipelineConfig, section: SinkSection | DeriveSection) -> list[str]:
    """Forget all that is known of it; its tables."""
    return forget_derived(config, section) if isinstance(section, DeriveSection) else forget_sink(config, section)


def dead_letters(config: PipelineConfig, label: str) -> DeadLetters:
    """The rows that the sink *label* refused. :raises ConfigError: there is no such sink."""
    return DeadLetters(str(config.dead_letters(_section(config, label))))


def replay(config: PipelineConfig, label: str) -> dict[str, int]:
    """Read the rows once more that the sink *label* refused, as they are now; how many of each table.

    :raises NotStarted: the pipeline does not run.
    """
    section = _section(config, label)
    if current_owner(config.work / RUN_FOLDER / LOCK_FILE) is None:
        raise NotStarted("The pipeline is not running.", next_step="Start it: headwater run")
    letters = dead_letters(config, label)
    query = config.query(section)
    tables = {letters.directory_of(table): table for table in described_tables(config.store)}
    done: dict[str, int] = {}
    for directory in letters.tables():
        table = tables.get(directory)
        rows = letters.rows(directory)
        if table is None or not rows.num_rows:
            continue
        keys = rows.select(list(table.key_columns)).group_by(list(table.key_columns)).aggregate([]).to_pylist()
        for detail in _ranges([[str(key[name]) for name in table.key_columns] for key in keys]):
            ask_query(config.state, query, RESNAPSHOT, {"table": table.full_name, **detail}, ANSWER_SECONDS)
        letters.put_away(directory)
        done[table.full_name] = rows.num_rows
    return done


def _ranges(keys: list[list[str]]) -> list[dict[str, Any]]:
    """One range for each of a few keys; the whole table for many."""
    if len(keys) > _MANY_KEYS:
        return [{"start": None, "end": None, "columns": None}]
    return [{"start": key, "end": key, "columns": None} for key in keys]


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
    if current_owner(config.work / RUN_FOLDER / LOCK_FILE) is not None:
        ask_pipeline(config.state, SinkRequest(section.label, SinkRequestKind.ADD), ANSWER_SECONDS)
    return config
