"""What the checkpoint of a query says, against the query's own state: one of them may be lost or replaced. Pure."""

from __future__ import annotations

from headwater.backfill.errors import QueryStateLost
from headwater.backfill.offset import QueryOffset


def check_start(query: str, start: QueryOffset, plan: int, delivered: QueryOffset | None) -> None:
    """A batch may begin at *start*: the newest plan of the state is *plan*, and *delivered* is at the sink.

    :raises QueryStateLost: *start* is of another state, or older than what was delivered.
    """
    if start.plan > plan:
        raise QueryStateLost(
            f"The checkpoint of query {query!r} is at plan {start.plan}, its state at {plan}: "
            "the state beside the store was lost or replaced.",
            next_step="Restore it, or begin anew with an empty checkpoint and an empty sink.",
        )
    if delivered is not None and (start.plan < delivered.plan or start.epoch < delivered.epoch):
        raise QueryStateLost(
            f"The checkpoint of query {query!r} is older than what was delivered: it is at plan "
            f"{start.plan} and epoch {start.epoch}, its state at plan {delivered.plan} and epoch {delivered.epoch}.",
            next_step="Use the newest checkpoint; or begin anew with another query name, an empty checkpoint and"
            " an empty sink: what lies between would be missing.",
        )


def check_end(query: str, end: QueryOffset, plan: int) -> None:
    """A batch ends at *end*. :raises QueryStateLost: that is not of the newest plan, *plan*."""
    if end.plan != plan:
        raise QueryStateLost(
            f"The batch is of plan {end.plan}, the state of query {query!r} at {plan}.",
            next_step="Restore the state beside the store, or begin anew with an empty checkpoint and sink.",
        )
