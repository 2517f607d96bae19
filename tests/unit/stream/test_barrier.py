"""Barriers and mutations: what they promise, what they refuse, and their JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.stream import (
    Barrier,
    BarrierError,
    BarrierKind,
    Epoch,
    EpochPair,
    FormatError,
    Mutation,
    Pause,
    Resnapshot,
    Resume,
    Throttle,
)

PAIR = EpochPair(curr=Epoch.from_ms(2), prev=Epoch.from_ms(1))
FIXTURE = Path(__file__).parents[2] / "fixtures" / "stream" / "barriers_v1.jsonl"

MUTATIONS: list[Mutation | None] = [
    None,
    Pause(),
    Resume(),
    Throttle(500, "public.orders"),
    Throttle(None),
    Pause("public.orders"),
    Resume("public.orders"),
    Resnapshot(),
    Resnapshot("public.orders", ("1", "a"), ("9", "z"), ("note",)),
]


@pytest.mark.parametrize(
    ("kind", "is_durable", "drains"),
    [
        (BarrierKind.INITIAL, False, False),
        (BarrierKind.BARRIER, False, False),
        (BarrierKind.CHECKPOINT, True, False),
        (BarrierKind.SYNC_CHECKPOINT, True, True),
    ],
)
def test_what_each_kind_promises(kind: BarrierKind, is_durable: bool, drains: bool) -> None:
    barrier = Barrier(PAIR, kind)
    assert (barrier.is_durable, barrier.drains) == (is_durable, drains)
    assert (barrier.closes, barrier.opens) == (PAIR.prev, PAIR.curr)


def test_only_an_initial_barrier_closes_no_epoch() -> None:
    first = EpochPair(curr=Epoch.from_ms(1), prev=Epoch(0))
    assert Barrier(first, BarrierKind.INITIAL).opens.ms == 1
    with pytest.raises(BarrierError, match="initial"):
        Barrier(first, BarrierKind.CHECKPOINT)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: type(mutation).__name__)
def test_json_round_trip_keeps_the_barrier_and_the_text(mutation: Mutation | None) -> None:
    for kind in BarrierKind:
        barrier = Barrier(PAIR, kind, mutation)
        text = barrier.to_json()
        assert Barrier.from_json(text) == barrier
        assert Barrier.from_json(text.encode()).to_json() == text
        assert list(json.loads(text)) == sorted(json.loads(text))


def test_barriers_of_version_1_stay_readable() -> None:
    lines = FIXTURE.read_text("utf-8").splitlines()
    expected = [Barrier(PAIR, BarrierKind.CHECKPOINT, mutation) for mutation in MUTATIONS]
    assert [Barrier.from_json(line) for line in lines] == expected
    assert [barrier.to_json() for barrier in expected] == lines


def test_equal_barriers_have_equal_texts() -> None:
    one = Resnapshot("public.orders", columns=("a", "b"))
    other = Resnapshot("public.orders", columns=["a", "b"])  # type: ignore[arg-type]
    texts = {Barrier(PAIR, BarrierKind.BARRIER, mutation).to_json() for mutation in (one, other)}
    assert len(texts) == 1
    assert hash(one) == hash(other)


GOOD: dict[str, Any] = {"curr": 131072, "kind": "checkpoint", "prev": 65536, "v": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 2}, "this release reads 1"),
        ({"v": None}, "this release reads 1"),
        ({"kind": "flush"}, "initial, barrier, checkpoint, sync_checkpoint"),
        ({"kind": None}, "initial, barrier"),
        ({"curr": 65536}, "curr must be after prev"),
        ({"curr": 131073}, "low 16 bits"),
        ({"curr": "131072"}, "AttributeError"),
        ({"curr": 1.5}, "AttributeError"),
        ({"prev": 0}, "closes no epoch"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"mutation": None}, "its type is none of"),
        ({"mutation": {"type": "explode"}}, "pause, resume"),
        ({"mutation": {"type": ["pause"]}}, "pause, resume"),
        ({"mutation": {"type": "pause", "for": 3}}, "the fields of 'pause'"),
        ({"mutation": {"type": "throttle"}}, "the fields of 'throttle'"),
        ({"mutation": {"type": "throttle", "rows_per_second": -1}}, "rows_per_second=-1"),
        ({"mutation": {"type": "throttle", "rows_per_second": True}}, "rows_per_second=True"),
        ({"mutation": {"type": "update_vnode_bitmap", "bitmaps": {}}}, "its type is none of"),
        ({"mutation": {"type": "pause", "target": ""}}, "target ''"),
    ],
)
def test_other_json_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert Barrier.from_json(json.dumps(GOOD)).is_durable
    with pytest.raises(FormatError, match=reason):
        Barrier.from_json(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", b"\xff"])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(FormatError):
        Barrier.from_json(text)


def test_every_missing_field_is_refused() -> None:
    for field in GOOD:
        with pytest.raises(FormatError):
            Barrier.from_json(json.dumps({name: value for name, value in GOOD.items() if name != field}))


def test_bad_mutations_are_refused() -> None:
    with pytest.raises(BarrierError, match="target"):
        Throttle(1, "")
