"""The settings of a pipeline, from ``pipeline.toml`` or from Python: the same models behind both.

========================  =======================================================================================
table                     what it says
========================  =======================================================================================
``[pipeline]``            its name; where logs, state and checkpoints are kept
``[source]``              the database, its tables, how its log is followed
``[table."schema.name"]`` what is special about one table
``[[sink]]``              one place of delivery; as many as there are
``[[derive]]``            a table that a function makes of kept ones (docs/derive.md)
``[backfill]``            how the history is read
``[spark]``               master and settings of the Spark session
``[limits]``              how much one batch may hold
========================  =======================================================================================

``${NAME}`` in any text is the environment variable of that name, so that no password has to be in the file; ``$${`` is
``${`` itself. Paths are relative to the file. A key that nobody knows is refused with the nearest one that is known.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.query import QueryOptions
from headwater.backfill.since import parse_since
from headwater.capture import CaptureOptions
from headwater.derive.derivation import Derivation
from headwater.derive.errors import InvalidDerivation
from headwater.pipeline.errors import ConfigError, ConfigNotFound
from headwater.pipeline.toml_lines import line_of
from headwater.sinks.errors import SinkInputError
from headwater.sinks.open import KINDS, SinkOptionError, default_mode, open_sink, option_names
from headwater.sinks.sink import Mode, Sink
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.open import home_of
from headwater.sources.splits import SplitKind
from headwater.sources.table import SpecialValues

DEFAULT_FILE: Final = "pipeline.toml"
KEPT_KIND: Final = "table"
"""The kind of sink that keeps tables, for all that is made of them later."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
SpecialValue = Literal["error", "null", "text"]
Origin = Literal["auto", "source", "tables"]
_VARIABLE: Final = re.compile(r"\$(\$\{|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_SECRET_KEYS: Final = frozenset({"dsn"})
_PLACES: Final = frozenset({"path", "warehouse"})
"""Options of sinks that are paths, relative to the file."""
_STAGING: Final = "staging"
_CAPTURE: Final = CaptureOptions()
_QUERY: Final[dict[str, Any]] = {field.name: field.default for field in fields(QueryOptions)}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PipelineSection(_Section):
    """``store``: where the logs are; a directory, or an object store. ``work``: a local directory for the rest."""

    name: Name = "pipeline"
    store: str | None = None
    work: str | None = None


class SourceSection(_Section):
    """The database. ``tables``: names, or patterns such as ``public.*``."""

    dsn: str | None = Field(default=None, repr=False)
    dsn_env: str | None = None
    tables: list[str] = Field(min_length=1)
    slot: str = "headwater"
    publication: str = "headwater"
    poll: bool = False
    schema_policy: Literal["evolve", "ignore", "stop"] = "evolve"
    epoch_seconds: float = Field(default=_CAPTURE.epoch_seconds, gt=0)
    epoch_rows: int = Field(default=_CAPTURE.epoch_rows, ge=1)
    epoch_bytes: int = Field(default=_CAPTURE.epoch_bytes, ge=1)
    heartbeat_seconds: float = Field(default=_CAPTURE.heartbeat_seconds, gt=0)
    retry_seconds: float = Field(default=_CAPTURE.retry_seconds, gt=0)


class TableSection(_Section):
    """One table. ``special_values``: by column, what happens to values that Arrow does not have.

    ``columns``: of a collection without a schema: ``inferred``, ``document``, or names and types.
    """

    special_values: dict[str, SpecialValue] = Field(default_factory=dict)
    columns: Literal["inferred", "document"] | dict[str, str] = "inferred"


class SinkSection(_Section):
    """One place of delivery. ``tables``: those of the source that go there; all by default.

    ``bad_rows``: what happens to a row that the sink refuses. ``from``: where its history comes from, if not as
    ``[backfill]`` says. ``since``: no history, and changes from an epoch or a time on. ``kind`` is one of ours, or
    ``module:Class``; the other keys are the options of that kind.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, serialize_by_alias=True)

    kind: str
    name: Name | None = None
    mode: Literal["mirror", "changes", "history"] | None = None
    tables: list[str] = Field(default_factory=lambda: ["*"], min_length=1)
    bad_rows: Literal["stop", "park"] = "stop"
    origin: Origin | None = Field(default=None, alias="from")
    since: str | int | datetime | None = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Without its options: some of them are secret."""
        return ((name, getattr(self, name)) for name in type(self).model_fields)

    @property
    def label(self) -> str:
        """Its name; its kind where it has none."""
        return self.name or self.kind.rpartition(":")[2]

    @property
    def delivery(self) -> Mode:
        return default_mode(self.kind) if self.mode is None else Mode(self.mode)

    @property
    def since_text(self) -> str | None:
        """The epoch, or the time, as text."""
        if self.since is None:
            return None
        return self.since.isoformat() if isinstance(self.since, datetime) else str(self.since)

    @property
    def options(self) -> dict[str, Any]:
        """What its kind has more."""
        return dict(self.model_extra or {})

    def open(self) -> Sink:
        """:raises SinkInputError: it cannot be what it says."""
        return open_sink(self.kind, **self.options, mode=self.delivery)

    @property
    def place(self) -> str:
        """Where it delivers to, without secrets."""
        return self.open().name.partition(":")[2]


class DeriveSection(_Section):
    """A derived table: ``function`` over ``tables``, which a sink of kind ``table`` keeps, delivered to ``sink``.

    ``by``: the columns that it goes by, of all tables or by the name of each. ``key``: of its rows; ``by`` otherwise.
    ``path``: where the module of the function is; beside the file by default.
    """

    name: Name
    function: str | Callable[..., Any]
    tables: list[str] = Field(min_length=1)
    by: list[str] | dict[str, list[str]]
    key: list[str] = Field(default_factory=list)
    sink: str | None = None
    path: str | None = None
    interval_seconds: float = Field(default=5.0, gt=0)

    @property
    def label(self) -> str:
        return self.name

    @property
    def derivation(self) -> Derivation:
        """:raises InvalidDerivation: it cannot be one."""
        return Derivation.of(self.name, self.function, self.tables, self.by, self.key)


class BackfillSection(_Section):
    """How the history is read; ``snapshot = false`` delivers changes only. ``from``: where a new sink has it from."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True)

    snapshot: bool = True
    origin: Origin = Field(default="auto", alias="from")
    mode: Literal["parallel", "single"] = "parallel"
    split_rows: int = Field(default=_QUERY["split_rows"], ge=1)
    split_kind: Literal["key", "heap"] | None = None
    interval_seconds: float = Field(default=_QUERY["interval_seconds"], gt=0)
    rows_per_second: int | None = Field(default=None, ge=0)


class SparkSection(_Section):
    """The Spark session that the pipeline starts."""

    master: str = "local[*]"
    conf: dict[str, str] = Field(default_factory=dict)


class LimitsSection(_Section):
    """Of changes in one batch; an epoch is never divided."""

    max_rows: int | None = Field(default=None, ge=1)
    max_epochs: int | None = Field(default=None, ge=1)


class PipelineConfig(_Section):
    """All settings of one pipeline, checked. ``sink`` and ``table`` are named as the file spells them."""

    pipeline: PipelineSection = PipelineSection()
    source: SourceSection
    table: dict[str, TableSection] = Field(default_factory=dict)
    sink: list[SinkSection] = Field(default_factory=list)
    derive: list[DeriveSection] = Field(default_factory=list)
    backfill: BackfillSection = BackfillSection()
    spark: SparkSection = SparkSection()
    limits: LimitsSection = LimitsSection()

    @property
    def name(self) -> str:
        return self.pipeline.name

    @property
    def parts(self) -> tuple[SinkSection | DeriveSection, ...]:
        """What is delivered to: the sinks, then the derived tables. Each has its own label."""
        return (*self.sink, *self.derive)

    @property
    def dsn(self) -> str:
        """The connection string; secret."""
        assert self.source.dsn is not None
        return self.source.dsn

    @property
    def home(self) -> str:
        """The schema or database of tables that are named alone."""
        return home_of(self.dsn)

    @property
    def store(self) -> str:
        """The location of the capture's store, and of all that is beside it."""
        assert self.pipeline.store is not None
        return self.pipeline.store

    @property
    def work(self) -> Path:
        """A local directory for what is no store: locks, checkpoints, the journal, spilled transactions."""
        assert self.pipeline.work is not None
        return Path(self.pipeline.work)

    @property
    def capture_options(self) -> CaptureOptions:
        source = self.source
        return CaptureOptions(
            epoch_seconds=source.epoch_seconds,
            epoch_rows=source.epoch_rows,
            epoch_bytes=source.epoch_bytes,
            heartbeat_seconds=source.heartbeat_seconds,
            retry_seconds=source.retry_seconds,
            schema_policy=SchemaPolicy(source.schema_policy),
        )

    @property
    def special_values(self) -> dict[str, SpecialValues]:
        """By ``schema.table.column``."""
        return {
            f"{table}.{column}": SpecialValues(policy)
            for table, section in self.table.items()
            for column, policy in section.special_values.items()
        }

    @property
    def columns(self) -> dict[str, str]:
        """Of collections without a schema, by name: how their columns are found."""
        return {
            table: section.columns if isinstance(section.columns, str) else _struct(section.columns)
            for table, section in self.table.items()
            if section.columns != "inferred"
        }

    def query(self, sink: SinkSection | DeriveSection) -> str:
        """The name of the query that delivers to *sink*, or derives."""
        return f"{self.name}-{sink.label}"

    def dead_letters(self, sink: SinkSection) -> Path:
        """Where the rows are that *sink* refused."""
        return self.work / "dead_letters" / sink.label

    def checkpoint(self, sink: SinkSection) -> Path:
        return self.work / "checkpoints" / sink.label

    def kept_tables(self, sink: SinkSection) -> str | None:
        """The folder of kept tables that the history of *sink* can come from; ``None``: there are none."""
        if sink.kind == KEPT_KIND:
            return None
        return next((str(one.options["path"]) for one in self.sink if one.kind == KEPT_KIND), None)

    def query_options(self, sink: SinkSection, tables: Sequence[str], parallelism: int) -> QueryOptions:
        """What the query of *sink* does, for those of *tables* that it takes."""
        backfill = self.backfill
        return QueryOptions(
            store=self.store,
            source=self.dsn,
            query=self.query(sink),
            tables=tuple(matching(sink.tables, tables, self.home)),
            history=backfill.snapshot and sink.since is None,
            kept=self.kept_tables(sink),
            origin="source" if sink.kind == KEPT_KIND else sink.origin or backfill.origin,
            since=sink.since_text,
            new_columns=self.source.schema_policy != "ignore",
            backfill=backfill.mode,
            split_rows=backfill.split_rows,
            split_kind=None if backfill.split_kind is None else SplitKind(backfill.split_kind),
            keyed=sink.delivery is Mode.MIRROR,
            interval_seconds=backfill.interval_seconds,
            rows_per_second=backfill.rows_per_second,
            parallelism=parallelism,
            max_rows=self.limits.max_rows,
            max_epochs=self.limits.max_epochs,
        )


def _struct(columns: Mapping[str, str]) -> str:
    """Names and types as one type."""
    return f"struct<{', '.join(f'`{name}`: {kind}' for name, kind in columns.items())}>"


def is_pattern(name: str) -> bool:
    """Whether *name* stands for several tables."""
    return not name.startswith('"') and any(letter in name for letter in "*?[")


def matching(patterns: Sequence[str], tables: Sequence[str], home: str) -> list[str]:
    """Those of *tables* that a pattern, or a name of one in the schema or database *home*, stands for; in order."""
    return [
        table
        for table in tables
        if any(fnmatchcase(table, pattern) or table == f"{home}.{pattern}" for pattern in patterns)
    ]


def load(path: str | Path = DEFAULT_FILE) -> PipelineConfig:
    """The settings in the file *path*.

    :raises ConfigNotFound: there is no such file. :raises ConfigError: it cannot be used; the line, the key and what
        is valid there.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigNotFound(
            f"There is no {path}.", next_step="Go to the directory that has it, or name it; docs/pipeline.md shows one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}.", next_step="Check the file.") from None
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}.", next_step="Mend that line.") from None
    return configure(read, folder=path.absolute().parent, origin=str(path), text=text)


def configure(
    settings: Mapping[str, Any], *, folder: Path | None = None, origin: str = "", text: str = ""
) -> PipelineConfig:
    """*settings*, checked and completed.

    :param folder: what relative paths begin at; the current directory by default.
    :param origin: the file that they come from, with its *text*: for messages.
    :raises ConfigError: they cannot be used.
    """
    told = _Teller(origin, text)
    try:
        config = PipelineConfig.model_validate(_expanded(settings, told, ()))
    except ValidationError as error:
        raise told.first(error) from None
    return _completed(config, folder or Path.cwd(), told)


def _completed(config: PipelineConfig, folder: Path, told: _Teller) -> PipelineConfig:
    source, pipeline = config.source, config.pipeline
    if (source.dsn is None) == (source.dsn_env is None):
        raise told.error(("source",), "needs either dsn or dsn_env", 'Write dsn_env = "SHOP_DSN" in [source].')
    dsn = source.dsn
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
            "source": source.model_copy(update={"dsn": dsn}),
            "pipeline": pipeline.model_copy(update={"store": store, "work": work}),
            "sink": sinks,
            "derive": derived,
        }
    )


def _completed_derivation(config: PipelineConfig, place: int, dsn: str, folder: Path, told: _Teller) -> DeriveSection:
    """It, with its sink, the full names of its tables, and where its function is."""
    path: tuple[str | int, ...] = ("derive", place)
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


def _completed_sink(sink: SinkSection, place: int, folder: Path, work: Path, told: _Teller) -> SinkSection:
    """*sink* with whole paths, and a place in *work* where it stages rows if it needs one."""
    path: tuple[str | int, ...] = ("sink", place)
    if sink.kind not in KINDS and ":" not in sink.kind:
        raise told.unknown((*path, "kind"), sink.kind, sorted(KINDS))
    options = sink.options
    try:
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
            raise told.surplus((*path, error.option), [*_keys_at(path), *option_names(sink.kind)]) from None
        if error.option not in options and error.option != "mode":
            raise told.error((*path, error.option), "is missing", error.next_step) from None
        raise told.error((*path, error.option), f"is wrong. {error.message.rstrip('.')}", error.next_step) from None
    except SinkInputError as error:
        raise told.error(path, f"cannot be used. {error.message.rstrip('.')}", error.next_step) from None
    return made


def _check_beginning(sink: SinkSection, path: tuple[str | int, ...], told: _Teller) -> None:
    """Where its history comes from, or since when it has changes."""
    for key, value in (("from", sink.origin), ("since", sink.since)):
        if sink.kind == KEPT_KIND and value is not None:
            raise told.error((*path, key), "has no meaning for tables that we keep", "Leave it out.")
    if sink.since_text is not None:
        try:
            parse_since(sink.since_text)
        except InvalidQuery as error:
            raise told.error((*path, "since"), f"is wrong. {error.message.rstrip('.')}", error.next_step) from None


def _placed(path: str, folder: Path) -> str:
    return path if "://" in path else str(folder / Path(path).expanduser())


def _expanded(value: Any, told: _Teller, path: tuple[str | int, ...]) -> Any:
    if isinstance(value, str):

        def variable(found: re.Match[str]) -> str:
            if found[2] is None:
                return "${"
            if found[2] not in os.environ:
                raise told.unset(path, found[2])
            return os.environ[found[2]]

        return _VARIABLE.sub(variable, value)
    if isinstance(value, Mapping):
        return {name: _expanded(item, told, (*path, name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_expanded(item, told, (*path, place)) for place, item in enumerate(value)]
    return value


class _Teller:
    """Says where something is wrong in the settings, without the values of secret keys."""

    def __init__(self, origin: str, text: str) -> None:
        self._origin, self._text = origin, text

    def error(self, path: tuple[str | int, ...], problem: str, next_step: str | None = None) -> ConfigError:
        line = line_of(self._text, path) if self._text else None
        where = f"{self._origin}, line {line}: " if line else f"{self._origin}: " if self._origin else ""
        return ConfigError(f"{where}{_shown(path)} {problem}.", key=_dotted(path), next_step=next_step)

    def unset(self, path: tuple[str | int, ...], variable: str) -> ConfigError:
        return self.error(
            path, f"names the environment variable {variable}, which is not set", f"Run: export {variable}=…"
        )

    def surplus(self, path: tuple[str | int, ...], known: Sequence[str]) -> ConfigError:
        """A key that nobody knows."""
        valid = sorted(set(known))
        near = difflib.get_close_matches(str(path[-1]), valid, 1)
        step = f"Did you mean {near[0]}? " if near else ""
        return self.error(path, "is no key that is known", f"{step}Valid here: {', '.join(valid)}.")

    def unknown(self, path: tuple[str | int, ...], given: str, valid: Sequence[str]) -> ConfigError:
        """A word that is none of those that are valid."""
        near = difflib.get_close_matches(given, valid, 1)
        step = f"Did you mean {near[0]!r}? " if near else ""
        return self.error(path, f"is {given!r}", f"{step}Valid are {', '.join(map(repr, valid))}.")

    def first(self, error: ValidationError) -> ConfigError:
        """One of the errors that pydantic found, in our words; a key too many explains one that is missing."""
        errors = error.errors(include_url=False, include_context=False)
        found = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        path, kind = tuple(found["loc"]), found["type"]
        if kind == "extra_forbidden":
            return self.surplus(path, _keys_at(path[:-1]))
        if kind == "missing":
            return self.error(path, "is missing", _EXAMPLES.get(str(path[-1]), "Write it."))
        if kind == "literal_error":
            return self.unknown(path, str(found["input"]), list(_choices_at(path)))
        received = "" if path and path[-1] in _SECRET_KEYS else f"; received {_shape(found['input'])}"
        if kind == "string_pattern_mismatch":
            return self.error(path, f"is no name{received}", "Write letters, digits, _ and -, a letter or digit first.")
        if path == ("sink",) and kind == "list_type":
            return self.error(path, "is one table, and a pipeline may have several sinks", "Write [[sink]].")
        example = _EXAMPLES.get(str(path[-1])) if path else None
        step = example or "docs/pipeline.md has what each setting may be."
        return self.error(path, f"is wrong: {_lowered(found['msg'])}{received}", step)


_EXAMPLES: Final = {
    "source": "Add a table [source] with dsn_env and tables.",
    "tables": 'Write tables = ["public.orders"] in [source].',
    "kind": 'Write kind = "delta" in [[sink]].',
}


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shape(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    names = {str: "a text", list: "an array", dict: "a table", type(None): "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _shown(path: Sequence[str | int]) -> str:
    """The key for a person: ``[source] slot``, ``[[sink]] number 2, path``."""
    if not path:
        return "The pipeline"
    section, *rest = path
    if section in ("sink", "derive") and rest and isinstance(rest[0], int):
        return " ".join([f"[[{section}]] number {rest[0] + 1},", *map(str, rest[1:])]).rstrip(",")
    if section == "table" and rest:
        return " ".join([f'[table."{rest[0]}"]', *map(str, rest[1:])])
    return " ".join([f"[{section}]" if section in PipelineConfig.model_fields else str(section), *map(str, rest)])


def _annotations(path: Sequence[str | int]) -> Iterator[Any]:
    """The types that the value at *path* may have."""
    types: list[Any] = [PipelineConfig]
    for part in path:
        following = []
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                named = {one.alias or name: one for name, one in kind.model_fields.items()}
                field = named.get(str(part))
                following += [] if field is None else _unpacked(field.annotation)
            elif get_args(kind):
                following += _unpacked(get_args(kind)[-1])
        types = following
    yield from types


def _unpacked(annotation: Any) -> list[Any]:
    """The members of a union; the type itself otherwise."""
    if get_origin(annotation) in (UnionType, Union):
        return [part for part in get_args(annotation) if part is not type(None)]
    return [annotation]


def _keys_at(path: Sequence[str | int]) -> list[str]:
    return [
        key
        for kind in _annotations(path)
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for key in (field.alias or name for name, field in kind.model_fields.items())
    ]


def _choices_at(path: Sequence[str | int]) -> Iterator[str]:
    for kind in _annotations(path):
        yield from (value for value in get_args(kind) if isinstance(value, str))
