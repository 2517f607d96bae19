"""Opens a source by its connection string."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headwater.sources.errors import DriverMissing, InvalidDsn
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.source import Source
from headwater.sources.table import SpecialValues


def open_source(
    dsn: str,
    *,
    spill: Path,
    schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
    special_values: Mapping[str, SpecialValues] | None = None,
    slot: str = "headwater",
    publication: str = "headwater",
    poll: bool = False,
) -> Source:
    """The source at *dsn*; nothing is connected yet.

    :param spill: where large transactions wait for their commit.
    :param special_values: policies by ``schema.table.column``.
    :raises InvalidDsn: no kind of database that can be captured. The text is not repeated: it may hold a password.
    :raises DriverMissing: Headwater was installed without the driver of this kind.
    """
    kind = dsn.partition("://")[0]
    if kind in ("postgres", "postgresql") or "=" in kind:
        with postgres_driver():
            from headwater.sources.postgres.source import PostgresSource

        return PostgresSource(
            dsn,
            spill=spill,
            schema_policy=schema_policy,
            special_values=special_values or {},
            slot=slot,
            publication=publication,
            poll=poll,
        )
    raise InvalidDsn(
        "The connection string names no database that can be captured.",
        next_step="Write postgresql://user@host:5432/database.",
    )


@contextmanager
def postgres_driver() -> Iterator[None]:
    """Around imports that need the driver for Postgres.

    :raises DriverMissing: it is not installed, or the library that it needs is not.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "psycopg" and "pq wrapper" not in str(error):
            raise
        raise DriverMissing(
            "The driver for Postgres is not installed.", next_step="Run: pip install 'headwater[postgres]'"
        ) from None
