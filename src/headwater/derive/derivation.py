"""Derivation: what a derived table is made of: a function, its tables, and the columns that it goes by.

The contract of the function ``f(first, second, …)``, one DataFrame for each table: with the rows of all tables that
have some values in their ``by`` columns, and no others, it gives the rows of the result that belong to these values.
So a result can be mended where its tables changed. Row by row (by the primary key), grouped by ``by``, and joined on
``by`` are of that kind; a rank over a whole table is not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from headwater.derive.affected import key_types
from headwater.derive.errors import InvalidDerivation, ResultChanged
from headwater.sources.table import RESERVED_COLUMNS, SourceColumn, SourceTable

NAMESPACE: Final = "derived"
"""The schema that derived tables are in."""
By = Sequence[str] | Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Derivation:
    """One derived table.

    :ivar name: of the table, in :data:`NAMESPACE`. :ivar function: ``module:function``, or the function itself.
    :ivar tables: full names, in the order of the function's parameters.
    :ivar by: of each table, its columns; one names the same values in all of them.
    :ivar key: what makes a row of the result unique; empty: the columns *by* of the first table.
    """

    name: str
    function: str | Callable[..., Any]
    tables: tuple[str, ...]
    by: tuple[tuple[str, ...], ...]
    key: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        function: str | Callable[..., Any],
        tables: Sequence[str],
        by: By,
        key: Sequence[str] = (),
    ) -> Derivation:
        """:raises InvalidDerivation: no table, one twice, no column to go by, or not the same number for each table."""
        if not tables or len(set(tables)) != len(tables):
            raise InvalidDerivation(f"Derivation {name!r} needs tables, each once.", next_step="Name them in tables.")
        if isinstance(by, Mapping):
            strange = next((table for table in by if table not in tables), None)
            lacks = next((table for table in tables if table not in by), None)
            if strange is not None or lacks is not None:
                raise InvalidDerivation(
                    f"In derivation {name!r}, by has {'no columns of' if strange is None else 'columns of'} "
                    f"{lacks if strange is None else strange}{'' if strange is None else ', which it does not read'}.",
                    next_step=f"Name columns of {', '.join(tables)} in by.",
                )
            columns = tuple(tuple(by[table]) for table in tables)
        else:
            columns = tuple(tuple(by) for _ in tables)
        if not columns[0] or len({len(one) for one in columns}) != 1:
            raise InvalidDerivation(
                f"Derivation {name!r} needs the columns that it goes by, as many in each table.",
                next_step='Write by = ["customer_id"]; for a transform of single rows, the primary key.',
            )
        return cls(name, function, tuple(tables), columns, tuple(key))

    @property
    def full_name(self) -> str:
        """Of the table that is derived."""
        return f"{NAMESPACE}.{self.name}"

    @property
    def key_columns(self) -> tuple[str, ...]:
        return self.key or self.by[0]

    def load(self, folder: Path | None = None) -> Callable[..., Any]:
        """The function. :param folder: where its module may be, beside the usual places.

        :raises InvalidDerivation: there is none.
        """
        return self.function if callable(self.function) else load_function(self.name, self.function, folder)

    def check(self, tables: Sequence[SourceTable]) -> list[Any]:
        """The types of the ``by`` columns. :raises InvalidDerivation: a table has none such, or of another type."""
        told = []
        for table, by in zip(tables, self.by, strict=True):
            missing = next((name for name in by if name not in table.schema.names), None)
            if missing is not None:
                raise InvalidDerivation(
                    f"Derivation {self.name!r} goes by {missing!r}, which {table.full_name} does not have.",
                    next_step=f"It has {', '.join(table.schema.names)}.",
                )
            told.append((table.full_name, [(name, table.column(name).type) for name in by]))
        return key_types(self.name, told)


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """The columns that the function gives, as Arrow and as Spark call their types."""

    names: tuple[str, ...]
    types: tuple[Any, ...]
    texts: tuple[str, ...] = field(default=())

    def table(self, derivation: Derivation, known: SourceTable | None) -> SourceTable:
        """The derived table. :param known: as it was when it was begun.

        :raises InvalidDerivation: it cannot be one. :raises ResultChanged: it is not what it was.
        """
        key = derivation.key_columns
        reserved = next((name for name in self.names if name in RESERVED_COLUMNS or name == "_side"), None)
        if reserved is not None:
            raise InvalidDerivation(
                f"The function of {derivation.full_name} gives a column {reserved!r}, a name that is taken.",
                next_step="Rename the column.",
            )
        missing = next((name for name in key if name not in self.names), None)
        if missing is not None:
            raise InvalidDerivation(
                f"The function of {derivation.full_name} gives no column {missing!r}, which is of its key.",
                next_step=f"It gives {', '.join(self.names)}: name some of them in key, or give {missing!r} as well.",
            )
        columns = zip(self.names, self.types, self.texts, strict=True)
        made = SourceTable(
            NAMESPACE,
            derivation.name,
            tuple(SourceColumn(name, kind, text, place) for place, (name, kind, text) in enumerate(columns, 1)),
            key,
        )
        if known is not None and made != known:
            raise ResultChanged(
                f"The function of {derivation.full_name} gives other columns than when the table was begun: "
                f"{', '.join(_difference(known, made))}.",
                next_step=f"To rebuild the table: headwater sink drop {derivation.name} && headwater resume --sink "
                f"{derivation.name}",
            )
        return made


def load_function(name: str, text: str, folder: Path | None = None) -> Callable[..., Any]:
    """The function *text*, ``module:function``; what it calls in tasks is taken along there.

    :raises InvalidDerivation: there is none.
    """
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute):
        raise InvalidDerivation(
            f"Derivation {name!r} has the function {text!r}.", next_step="Write module:function, as shop_views:totals."
        )
    place = None if folder is None else str(folder)
    if place is not None and place not in sys.path:
        sys.path.insert(0, place)
    try:
        found = _module(module)
        function = getattr(found, attribute)
    except Exception as error:  # whatever is wrong with the module: a person mends it
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise InvalidDerivation(
            f"The function {text!r} of derivation {name!r} cannot be imported: {kind}{error}.",
            next_step="Put its module beside pipeline.toml, or where Python finds it.",
        ) from None
    if not callable(function):
        raise InvalidDerivation(f"{text!r} of derivation {name!r} is no function.", next_step="Name a function.")
    _send_along(found)
    return function  # type: ignore[no-any-return]


_loaded: dict[str, tuple[str, int]] = {}
"""By module: its file, and when that was written, as it was loaded."""


def _module(name: str) -> ModuleType:
    """The module as its file is now: an edit counts from the next start of its derivations on.

    It is made anew, and not changed: those who run go on with what they had, and with all that it calls.
    """
    known = sys.modules.get(name)
    if known is not None and _loaded.get(name, _written(known)) == _written(known):
        found = known
    else:
        importlib.invalidate_caches()  # it may have been written since somebody looked
        sys.modules.pop(name, None)
        try:
            found = importlib.import_module(name)
        except BaseException:
            if known is not None:
                sys.modules[name] = known
            raise
    _loaded[name] = _written(found)
    return found


def _written(module: ModuleType) -> tuple[str, int]:
    place = getattr(module, "__file__", None) or ""
    try:
        return place, Path(place).stat().st_mtime_ns
    except OSError:
        return place, 0


def _send_along(module: Any) -> None:
    """Tasks run where nobody has the module: its functions travel whole."""
    from pyspark import cloudpickle

    register: Callable[[Any], None] = cloudpickle.register_pickle_by_value
    register(module)


def _difference(before: SourceTable, now: SourceTable) -> list[str]:
    old, new = ({column.name: column.source_type for column in table.columns} for table in (before, now))
    told = [f"{name} is gone" for name in old if name not in new]
    told += [f"{name} is new" for name in new if name not in old]
    told += [f"{name} is {new[name]} now" for name in old if name in new and new[name] != old[name]]
    if before.key_columns != now.key_columns:
        told.append(f"the key is {', '.join(now.key_columns)} now")
    return told or ["their order"]
