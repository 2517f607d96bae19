"""DeliveryLoop: brings what a query plans to its sink, batch by batch: plan, stage, commit.

=========  ===================================================================================================
step       what is durable after it
=========  ===================================================================================================
plan       the batch: where it begins, where it ends, and which parts of the backfill it reads
stage      nothing that counts: tasks write files or tables of their own names
commit     first *pending*, with what was staged; then the rows with their token, in the sink itself; *committed* with
           the next plan, or within a second when there is none
=========  ===================================================================================================

The planner decides and never waits; all waiting is here: for the next batch (:func:`next_batch`), for the log to come
to the columns of a snapshot (:func:`units_of`), for all that the source has committed (:func:`reach_source`).

A loop that starts again commits what is pending, and delivers a planned batch that is not committed once more, with
the same bounds: so a batch has one token, however often it is tried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from headwater.backfill.claims import BatchTooLarge, Budget, Claim, StagedClaims
from headwater.backfill.errors import LogBehind
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner, Recover
from headwater.backfill.tasks import Slots, cost, packed
from headwater.backfill.units import SnapshotUnit, SplitUnit
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.delivery import DeliveryState, read_parked
from headwater.sinks.sink import Sink, Staged, Token
from headwater.sources.table import SourceTable
from headwater.state.query_store import QueryStore
from headwater.system.clock import SYSTEM_CLOCK, Clock, Wait

_POLL_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.05
_COLUMNS_SECONDS: Final = 20.0
"""How long the log may take to come to columns that a new snapshot has."""
_SMALL_ROWS: Final = 5_000
_SMALL_BYTES: Final = 4 << 20
"""A batch up to these is small: a Spark job would cost more than its rows."""

T = TypeVar("T")
R = TypeVar("R")


class Jobs(Protocol):
    """Runs functions side by side, as jobs that can be cancelled."""

    @property
    def parallelism(self) -> int:
        """How many run at a time, now; it can wait until that is known."""

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        """What *function* returns for each of *inputs*, in any order; it may run more than once for one of them.

        :raises HeadwaterError: what the function raised. :raises JobFailed: the job itself.
        """


class Planner(Protocol):
    """Plans the batches of one query, and never waits; see :class:`~headwater.backfill.planner.QueryPlanner`."""

    generation: int

    @property
    def returning(self) -> Sequence[str]:
        """Tables that need a planner that is opened later; nothing else follows here."""

    @property
    def backfill_id(self) -> str: ...

    @property
    def wait(self) -> Wait:
        """What to wait for when nothing was planned."""

    def resume(self, committed: Collection[QueryOffset]) -> tuple[QueryOffset, QueryOffset | None]: ...

    def plan(self, start: QueryOffset, *, upto: int | None = None) -> QueryOffset:
        """Where the batch after *start*, which is delivered, ends; *start* when there is nothing to do now."""

    def units(self, start: QueryOffset, end: QueryOffset) -> Sequence[Any]: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=Planner, covariant=True)


class Deliverable(Protocol[P]):
    """What is delivered, and where; it travels to tasks. See :class:`~headwater.backfill.claims.Delivery`.

    :ivar name: of the query. :ivar store: of its logs. :ivar state: where its state is.
    :ivar parks_rows: rows that the sink refuses are parked.
    :ivar may_park: tables that may be parked, but for the last of them.
    """

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def sink(self) -> Sink: ...

    @property
    def parks_rows(self) -> bool: ...

    @property
    def may_park(self) -> Sequence[str]: ...

    def open_planner(
        self, recover: Recover, parked: Callable[[], Mapping[str, str]], slots: Slots, clock: Clock
    ) -> P: ...

    def stage(self, claims: Sequence[Claim], budget: Budget | None = None) -> StagedClaims: ...

    def commit_parked(self, parked: Sequence[Staged]) -> None: ...


def next_batch(
    planner: Planner, start: QueryOffset, timeout: float, clock: Clock = SYSTEM_CLOCK, **limits: int | None
) -> QueryOffset:
    """Where the batch after *start* ends; *start* when there was nothing to do for *timeout* seconds.

    :param limits: of the batch, as the planner takes them.
    """
    deadline = clock.monotonic() + timeout
    while True:
        end = planner.plan(start, **limits)
        left = deadline - clock.monotonic()
        if end != start or left <= 0 or planner.returning:
            return end
        planner.wait.take(left, clock)


def units_of(planner: Planner, start: QueryOffset, end: QueryOffset, clock: Clock = SYSTEM_CLOCK) -> Sequence[Any]:
    """What tasks read for the batch from *start* to *end*. :raises LogBehind: the capture does not come to it."""
    deadline = clock.monotonic() + _COLUMNS_SECONDS
    while True:
        try:
            return planner.units(start, end)
        except LogBehind:
            if clock.monotonic() > deadline:
                raise
        clock.sleep(_LOOK_SECONDS)


def reach_source(planner: QueryPlanner, timeout: float, clock: Clock = SYSTEM_CLOCK) -> QueryOffset:
    """The newest epoch once the log has everything that the source has committed now, or after *timeout*.

    :raises SourceUnreachable: no answer.
    """
    position, deadline = planner.source_position(), clock.monotonic() + timeout
    while (wait := planner.lacks(position)) is not None and (left := deadline - clock.monotonic()) > 0:
        wait.take(left, clock)
    return planner.newest()


class DeliveryLoop(Generic[P]):
    """The batches of one query; one thread. An earlier loop of the query is fenced.

    :param small_in_driver: small batches are staged in this thread, by the functions that tasks run.
    :param clock: of the loop and its planner.
    :ivar planner: what it asks for the next batch. :ivar position: what the sink has.
    :ivar waits_for: what it waits for now, and since when (milliseconds); ``None``: for nothing that can hang.
    :raises HeadwaterError: what is pending cannot be settled, or the state cannot be read.
    """

    def __init__(
        self, delivery: Deliverable[P], jobs: Jobs, *, small_in_driver: bool = False, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._delivery, self._jobs, self._small_in_driver = delivery, jobs, small_in_driver
        self._clock = clock
        self.waits_for: tuple[str, int] | None = None
        with ExitStack() as stack:
            self.planner, self._coordinator = self._open(stack)
            records = self._coordinator.records
            committed = [QueryOffset(one.epoch, one.plan) for one in records if one.state is DeliveryState.COMMITTED]
            self.position, self._planned = self.planner.resume(committed)
            self._is_again = self._planned is not None  # it may have ended the process that tried it before
            self._stack = stack.pop_all()

    @property
    def rows(self) -> int:
        """That were committed by this loop."""
        return self._coordinator.committed_rows

    def run(
        self,
        stop: threading.Event,
        turned: Callable[[bool], None] = lambda _: None,
        *,
        until: Callable[[], bool] = lambda: False,
        upto: int | None = None,
    ) -> None:
        """Deliver until *stop* is set, a parked table returns, or there is nothing to do and *until* holds.

        :param turned: called after each turn with whether it delivered a batch. :param upto: no epochs after this one.
        :raises HeadwaterError: nothing of the current batch is lost: open another loop.
        """
        while not (stop.is_set() or self.planner.returning):
            planned = self.plan(_POLL_SECONDS, upto)
            if planned:
                self.deliver()
            else:
                self._coordinator.flush()
                if until():
                    break
            turned(planned)

    def plan(self, timeout: float, upto: int | None = None) -> bool:
        """Whether there is a batch to deliver; it is waited for up to *timeout* seconds.

        :param upto: no epochs after this one.
        """
        if self._planned is None:
            end = next_batch(self.planner, self.position, timeout, self._clock, upto=upto)
            self._planned = None if end == self.position else end
        return self._planned is not None

    def deliver(self) -> None:
        """Deliver the batch that was planned."""
        assert self._planned is not None
        claims = self._claims(self.position, self._planned)
        if claims:
            self._commit(self._stage(claims, self._planned.epoch))
        self.position, self._planned, self._is_again = self._planned, None, False

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, stack: ExitStack) -> tuple[P, Coordinator]:
        delivery = self._delivery
        coordinators: list[Coordinator] = []

        def recover(store: QueryStore, backfill: str, tables: Sequence[SourceTable]) -> None:
            coordinators.append(Coordinator(store))
            coordinators[0].recover(delivery.sink, backfill, tables)

        def parked() -> dict[str, str]:
            found = coordinators[0].parked() if coordinators else read_parked(delivery.state, delivery.name)
            return {name: table.reason for name, table in found.items()}

        planner = delivery.open_planner(recover, parked, lambda: self._jobs.parallelism, self._clock)
        stack.callback(planner.close)
        return planner, coordinators[0]

    def _claims(self, start: QueryOffset, end: QueryOffset) -> list[Claim]:
        planner, delivery = self.planner, self._delivery
        token = Token(
            delivery.name, planner.backfill_id, start.epoch, end.epoch, end.plan, generation=planner.generation
        )
        suspects = self._coordinator.suspects() if delivery.parks_rows else frozenset[str]()
        return [
            Claim(
                unit,
                replace(token, attempt=unit.attempt) if isinstance(unit, SplitUnit | SnapshotUnit) else token,
                bool(suspects) and unit.table.full_name in suspects,
            )
            for unit in units_of(planner, start, end, self._clock)
        ]

    def _stage(self, claims: Sequence[Claim], epoch: int) -> StagedClaims:
        if self._small_in_driver and not self._is_again and sum(claim.unit.rows for claim in claims) <= _SMALL_ROWS:
            try:
                return self._delivery.stage(claims, Budget(_SMALL_ROWS, _SMALL_BYTES))
            except BatchTooLarge:
                pass  # the planner knows rows only by estimate
        description = f"headwater {self._delivery.name} {epoch}"
        result = StagedClaims()
        with self._waiting("Spark"):
            inputs = packed(claims, [cost(claim.unit) for claim in claims], lambda: self._jobs.parallelism)
            answers = self._jobs.run(self._delivery.stage, inputs, description)
        for staged in answers:
            result.add(staged)
        return result

    def _commit(self, result: StagedClaims) -> None:
        delivery = self._delivery
        if result.parked:
            delivery.commit_parked(result.parked)
        with self._waiting("the sink"):
            self._coordinator.deliver(
                delivery.sink,
                result.staged,
                result.failures,
                parks_rows=delivery.parks_rows,
                tables=delivery.may_park,
            )

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self.waits_for = what, self._clock.unix_ms()
        try:
            yield
        finally:
            self.waits_for = None
