"""What the server's catalog says of types: what they are made of, not how they are mapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headwater.sources.errors import SourceNotFound
from headwater.sources.postgres.connection import Connection, ask


class TypeKind(Enum):
    """``typtype`` of ``pg_type``."""

    BASE = "b"
    COMPOSITE = "c"
    DOMAIN = "d"
    ENUM = "e"
    PSEUDO = "p"
    RANGE = "r"
    MULTIRANGE = "m"


@dataclass(frozen=True, slots=True)
class CatalogType:
    """A type of the database.

    :ivar namespace: its schema; ``pg_catalog`` for what Postgres itself has.
    :ivar category: ``typcategory``; ``A`` is an array, ``E`` an enum, ``N`` a number, …
    :ivar element: of an array.
    :ivar base: of a domain, with its typmod in *base_typmod*.
    :ivar labels: of an enum, in its order. :ivar label_numbers: of each the oid, which stays when it is renamed.
    :ivar fields: of a composite type. :ivar field_numbers: of each its ``attnum``.
    :ivar subtype: of a range or multirange.
    :ivar extension: the extension that made it, such as ``hstore`` or ``vector``.
    """

    oid: int
    namespace: str
    name: str
    kind: TypeKind
    category: str
    delimiter: str = ","
    element: CatalogType | None = None
    base: CatalogType | None = None
    base_typmod: int = -1
    labels: tuple[str, ...] = ()
    label_numbers: tuple[int, ...] = ()
    fields: tuple[tuple[str, CatalogType, int], ...] = ()
    field_numbers: tuple[int, ...] = ()
    subtype: CatalogType | None = None
    extension: str | None = None


_TYPES = """
SELECT t.oid::bigint, n.nspname AS namespace, t.typname AS name, t.typtype::text AS kind,
       t.typcategory::text AS category, t.typdelim::text AS delimiter,
       CASE WHEN t.typsubscript = 'pg_catalog.array_subscript_handler'::pg_catalog.regproc AND t.typlen = -1
            THEN t.typelem ELSE 0 END::bigint AS element,
       t.typbasetype::bigint AS base, t.typtypmod AS base_typmod,
       (SELECT pg_catalog.array_agg(e.enumlabel::text ORDER BY e.enumsortorder)
        FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid) AS labels,
       (SELECT pg_catalog.array_agg(e.oid::bigint ORDER BY e.enumsortorder)
        FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid) AS label_numbers,
       f.names, f.types, f.typmods, f.numbers,
       COALESCE(r.rngsubtype, m.rngsubtype, 0)::bigint AS subtype,
       (SELECT e.extname FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_extension e ON e.oid = d.refobjid
        WHERE d.classid = 'pg_catalog.pg_type'::pg_catalog.regclass AND d.objid = t.oid AND d.deptype = 'e'
       ) AS extension
FROM pg_catalog.pg_type t
JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
LEFT JOIN pg_catalog.pg_range r ON r.rngtypid = t.oid
LEFT JOIN pg_catalog.pg_range m ON m.rngmultitypid = t.oid
LEFT JOIN LATERAL (
  SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) AS names,
         pg_catalog.array_agg(a.atttypid::bigint ORDER BY a.attnum) AS types,
         pg_catalog.array_agg(a.atttypmod ORDER BY a.attnum) AS typmods,
         pg_catalog.array_agg(a.attnum ORDER BY a.attnum) AS numbers
  FROM pg_catalog.pg_attribute a
  WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
) f ON true
WHERE t.oid = ANY(%s::oid[])
"""


def read_types(session: Connection, oids: Iterable[int]) -> dict[int, CatalogType]:
    """Types by their number, with all that they are made of.

    :raises SourceNotFound: a type was dropped meanwhile.
    """
    rows: dict[int, Any] = {}
    wanted = set(oids)
    while wanted:
        found = ask(session, _TYPES, [sorted(wanted)])
        rows |= {row.oid: row for row in found}
        if wanted - rows.keys():
            raise SourceNotFound("A type was dropped while the catalog was read.", next_step="Try again.")
        parts = {oid for row in found for oid in (row.element, row.base, row.subtype, *(row.types or ()))}
        wanted = parts - rows.keys() - {0}
    built: dict[int, CatalogType] = {}
    for oid in rows:
        _build(oid, rows, built)
    return built


def _build(oid: int, rows: Mapping[int, Any], built: dict[int, CatalogType]) -> CatalogType | None:
    """Types are made of others without cycles, so each is built after its parts."""
    if oid == 0:
        return None
    if oid not in built:
        row = rows[oid]
        parts = [_build(part, rows, built) for part in row.types or ()]
        fields = zip(row.names or (), parts, row.typmods or (), strict=True)
        built[oid] = CatalogType(
            oid=row.oid,
            namespace=row.namespace,
            name=row.name,
            kind=TypeKind(row.kind),
            category=row.category,
            delimiter=row.delimiter,
            element=_build(row.element, rows, built),
            base=_build(row.base, rows, built),
            base_typmod=row.base_typmod,
            labels=tuple(row.labels or ()),
            label_numbers=tuple(row.label_numbers or ()),
            fields=tuple((name, part, typmod) for name, part, typmod in fields if part is not None),
            field_numbers=tuple(row.numbers or ()),
            subtype=_build(row.subtype, rows, built),
            extension=row.extension,
        )
    return built[oid]
