"""Retention: how much a log may hold, by size and by age.

What all consumers have delivered is forgotten anyway. Retention is for the rest: a log without consumers, or with one
that does not come back. It refuses to drop what a consumer still needs; told to do it all the same, it does, and that
consumer stops with :class:`~headwater.log_store.errors.RetentionMiss`, never silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.log_store.errors import RetentionRefused
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.log_store.state import now_ms
from headwater.stream import Epoch


@dataclass(frozen=True, slots=True)
class Retention:
    """The bounds of a log; ``None`` is no bound."""

    max_bytes: int | None = None
    max_age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What a retention would drop: everything up to *upto*."""

    upto: Epoch
    epochs: int
    rows: int
    bytes: int
    needed_by: tuple[str, ...]


def plan_retention(
    factory: KvLogStoreFactory, log: str, retention: Retention, clock: Callable[[], int] = now_ms
) -> RetentionPlan:
    """What *retention* asks for now. :raises LogNotFound: no such log."""
    found = factory.existing(log)
    with factory.store.snapshot() as view:
        ends = list(LogView(view, found).epochs(factory.consumers.gone(log)))
    held = sum(end.size for end in ends)
    oldest_ms = None if retention.max_age_seconds is None else clock() - retention.max_age_seconds * 1000
    upto, epochs, rows, size = Epoch(0), 0, 0, 0
    for end in ends:
        too_big = retention.max_bytes is not None and held - size > retention.max_bytes
        too_old = oldest_ms is not None and end.sealed_ms < oldest_ms
        if not (too_big or too_old):
            break
        upto, epochs, rows, size = end.epoch, epochs + 1, rows + end.rows, size + end.size
    consumers = (*factory.consumers.of(log), *factory.remote.of(log))
    needed = tuple(sorted(consumer.name for consumer in consumers if consumer.delivered() < upto))
    return RetentionPlan(upto, epochs, rows, size, needed)


def apply_retention(
    factory: KvLogStoreFactory,
    log: str,
    retention: Retention,
    *,
    force: bool = False,
    clock: Callable[[], int] = now_ms,
) -> RetentionPlan:
    """Drop what *retention* asks for, in the next seal.

    :param force: also what consumers have not read; they stop with ``RetentionMiss``.
    :raises RetentionRefused: a consumer needs it. Nothing was dropped.
    """
    plan = plan_retention(factory, log, retention, clock)
    if plan.needed_by and not force:
        names = ", ".join(repr(name) for name in plan.needed_by)
        raise RetentionRefused(
            f"Retention of log {log!r} would drop {plan.epochs} epochs that consumer {names} has not read.",
            next_step="Let it catch up or drop it; force=True drops them all the same and stops it with RetentionMiss.",
        )
    if plan.epochs:
        factory.consumers.drop_epochs(factory.sealer.batch, factory.existing(log), plan.upto)
    return plan
