"""What the commands of ``headwater log`` share: arguments, the store, and errors that end with the next command."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from headwater.log_store import EpochGone, InvalidOffset, KvLogStoreFactory, LogNotFound
from headwater.state import open_reader, open_writer
from headwater.state.errors import StoreOwned
from headwater.stream import EpochClock

Location = Annotated[str, typer.Argument(help="Directory or URL of the store (slatedb+s3://bucket/prefix).")]
Name = Annotated[str, typer.Argument(metavar="LOG", help="Name of the log, such as public.orders.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

_COMMAND = "headwater log"


@contextmanager
def next_step(location: str, log: str) -> Iterator[None]:
    """Errors end with the next command."""
    try:
        yield
    except (EpochGone, InvalidOffset) as error:
        error.next_step = (
            error.next_step if _COMMAND in (error.next_step or "") else f"{_COMMAND} show {location} {log}"
        )
        raise
    except LogNotFound as error:
        error.next_step = f"headwater log status {location}"
        raise


@contextmanager
def free(command: str) -> Iterator[None]:
    """Who is refused because a process has the store is told what to do."""
    try:
        yield
    except StoreOwned as error:
        error.next_step = f"Stop that process, then: {command}"
        raise


@contextmanager
def owned(location: str) -> Iterator[KvLogStoreFactory]:
    open_reader(location).close()  # a store that does not exist is not made
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        try:
            yield factory
        finally:
            factory.close()


def seal(factory: KvLogStoreFactory) -> None:
    clock = EpochClock(lambda: time.time_ns() // 1_000_000, factory.store.committed_epoch())
    factory.sealer.seal(clock.next())


def span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if count]
    return " ".join(parts[:2]) or f"{rest} s"
