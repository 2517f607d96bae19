"""What checked settings leave to be found: connection, whole paths and names, places to stage; and what cannot be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.since import epoch_since
from headwater.databases.secret_files import SecretUnreadable, current, in_file, option_in_file, path_of
from headwater.derive.errors import InvalidDerivation
from headwater.pipeline.config.parts import KEPT_KIND, DeriveSection, SinkSection
from headwater.pipeline.config.pipeline_config import PipelineConfig
from headwater.pipeline.config.telling import KeyPath, Teller, keys_at
from headwater.sinks.errors import SinkInputError
from headwater.sinks.open import KINDS, SinkOptionError, option_names, secret_options
from headwater.sources.dsn import DsnUnreadable, current_dsn
from headwater.sources.open import home_of

_PLACES: Final = frozenset({"path", "warehouse"})
"""Options of sinks that are paths, relative to the file."""
_STAGING: Final = "staging"
_DSN: Final = "dsn"
_DSN_FILE: Final = "dsn_file"


def completed(config: PipelineConfig, folder: Path, told: Teller) -> PipelineConfig:
    """*config* with nothing left open; relative paths begin at *folder*. :raises ConfigError: it cannot be used."""
    source, pipeline = config.source, config.pipeline
    if [source.dsn, source.dsn_env, source.dsn_file].count(None) != 2:
        raise told.error(
            ("source",), "needs one of dsn, dsn_env and dsn_file", 'Write dsn_env = "SHOP_DSN" in [source].'
        )
    dsn = source.dsn
    if source.dsn_file is not None:
        dsn = _dsn_in_file(("source", "dsn_file"), source.dsn_file, folder, told)
    if source.dsn_env is not None:
        dsn = os.environ.get(source.dsn_env)
        if not dsn:
            raise told.unset(("source", "dsn_env"), source.dsn_env)
    labels = [sink.label for sink in config.sink]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise told.error(("sink", place, "name"), f"{label!r} names two sinks", "Give each [[sink]] its own name.")
    derived = [_completed_derivation(config, place, dsn or "", folder, told) for place in range(len(config.derive))]
    store = _placed(pipeline.store or f"headwater/{pipeline.name}", folder)
    work = pipeline.work or (store if "://" not in store else f"headwater/{pipeline.name}")
    work = _placed(work, folder)
    sinks = [_completed_sink(sink, place, folder, Path(work), told) for place, sink in enumerate(config.sink)]
    for place, sink in enumerate(sinks):
        wanted = sink.origin or config.backfill.origin
        if wanted == "tables" and not any(one.kind == KEPT_KIND for one in sinks):
            key = ("backfill", "from") if sink.origin is None else ("sink", place, "from")
            raise told.error(key, "is 'tables', and none are kept", f'Add [[sink]] with kind = "{KEPT_KIND}".')
    return config.model_copy(
        update={
            "source": source.model_copy(update={"dsn": dsn, "dsn_env": None, "dsn_file": None}),
            "pipeline": pipeline.model_copy(update={"store": store, "work": work}),
            "sink": sinks,
            "derive": derived,
        }
    )


def _completed_derivation(config: PipelineConfig, place: int, dsn: str, folder: Path, told: Teller) -> DeriveSection:
    """It, with its sink, the full names of its tables, and where its function is."""
    path: KeyPath = ("derive", place)
    section = config.derive[place]
    labels = [one.label for one in config.parts[: len(config.sink) + place]]
    if section.name in labels:
        raise told.error((*path, "name"), f"{section.name!r} names something else already", "Give it its own name.")
    if not any(sink.kind == KEPT_KIND for sink in config.sink):
        raise told.error(
            path, "needs kept tables", f'Add [[sink]] with kind = "{KEPT_KIND}": it keeps the tables of the pipeline.'
        )
    places = [sink.label for sink in config.sink if sink.kind != KEPT_KIND]
    if section.sink is None and len(places) != 1:
        raise told.error(
            (*path, "sink"), "is missing", f"Name one of {', '.join(places) or 'the sinks, which are none'}."
        )
    if section.sink is not None and section.sink not in places:
        raise told.unknown((*path, "sink"), section.sink, places)
    names = {table: f"{home_of(dsn)}.{table}" if "." not in table else table for table in section.tables}
    by = section.by if isinstance(section.by, list) else {names.get(name, name): by for name, by in section.by.items()}
    made = section.model_copy(
        update={
            "sink": section.sink or places[0],
            "tables": [names[table] for table in section.tables],
            "by": by,
            "path": _placed(section.path or ".", folder),
        }
    )
    try:
        made.derivation  # noqa: B018 - it is checked
    except InvalidDerivation as error:
        raise told.error(path, f"cannot be used. {error.message.rstrip('.')}", error.next_step) from None
    return made


def _completed_sink(sink: SinkSection, place: int, folder: Path, work: Path, told: Teller) -> SinkSection:
    """*sink* with whole paths, and a place in *work* where it stages rows if it needs one."""
    path: KeyPath = ("sink", place)
    if sink.kind not in KINDS and ":" not in sink.kind:
        raise told.unknown((*path, "kind"), sink.kind, sorted(KINDS))
    options = sink.options
    try:
        if _DSN in option_names(sink.kind) and isinstance(options.get(_DSN_FILE), str):
            if _DSN in options:
                raise told.error(path, "has both dsn and dsn_file", "Leave one of them out.")
            options[_DSN] = _dsn_in_file((*path, _DSN_FILE), options.pop(_DSN_FILE), folder, told)
        for name in secret_options(sink.kind) & set(options):
            options[name] = _secrets((*path, name), options[name], folder, told)
        for name in option_names(sink.kind):
            if name in _PLACES and isinstance(options.get(name), str):
                options[name] = _placed(options[name], folder)
        if _STAGING in option_names(sink.kind):
            options.setdefault(_STAGING, str(work / _STAGING / sink.label))
        if sink.kind == KEPT_KIND:
            options.setdefault("path", str(work / "tables"))
        _check_beginning(sink, path, told)
        made = SinkSection.model_validate(sink.model_dump(include=set(SinkSection.model_fields)) | options)
        opened = made.open()
        if made.bad_rows == "park" and not opened.capabilities.refuses_rows:
            raise told.error(
                (*path, "bad_rows"),
                f"has no meaning for a sink of kind {sink.kind!r}, which takes every row",
                "Leave it out.",
            )
    except SinkOptionError as error:
        if error.option in options and error.option not in option_names(sink.kind):
            raise told.surplus((*path, error.option), [*keys_at(path), *option_names(sink.kind)]) from None
        if error.option not in options and error.option != "mode":
            raise told.error((*path, error.option), "is missing", error.next_step) from None
        raise told.error((*path, error.option), f"is wrong. {error.message.rstrip('.')}", error.next_step) from None
    except SinkInputError as error:
        raise told.error(path, f"cannot be used. {error.message.rstrip('.')}", error.next_step) from None
    return made


def _check_beginning(sink: SinkSection, path: KeyPath, told: Teller) -> None:
    """Where its history comes from, or since when it has changes."""
    for key, value in (("from", sink.origin), ("since", sink.since)):
        if sink.kind == KEPT_KIND and value is not None:
            raise told.error((*path, key), "has no meaning for tables that we keep", "Leave it out.")
    if sink.since_text is not None:
        try:
            epoch_since(sink.since_text)
        except InvalidQuery as error:
            raise told.error((*path, "since"), f"is wrong. {error.message.rstrip('.')}", error.next_step) from None


def _dsn_in_file(path: KeyPath, file: str, folder: Path, told: Teller) -> str:
    """What stands for the connection string in *file*. :raises ConfigError: it cannot be read."""
    dsn = in_file(folder / Path(file).expanduser())
    try:
        current_dsn(dsn)
    except DsnUnreadable as error:
        raise told.error(path, f"cannot be used. {error.message.rstrip('.')}", error.next_step) from None
    return dsn


def _secrets(path: KeyPath, value: Any, folder: Path, told: Teller) -> Any:
    """*value* of a secret option, with the whole paths of files that have a secret. :raises ConfigError: unreadable."""
    if isinstance(value, Mapping):
        return {name: _secrets((*path, name), one, folder, told) for name, one in value.items()}
    if not isinstance(value, str) or not option_in_file(value):
        return value
    secret = in_file(folder / path_of(value).expanduser())
    try:
        current(secret)
    except SecretUnreadable as error:
        raise told.error(path, f"cannot be used. {error.message.rstrip('.')}", error.next_step) from None
    return secret


def _placed(path: str, folder: Path) -> str:
    return path if "://" in path else str(folder / Path(path).expanduser())
