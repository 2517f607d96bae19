"""Which servers are taken, and what becomes of errors that no server told."""

from __future__ import annotations

from typing import Any

import pytest
from bson.errors import InvalidBSON
from pymongo import errors as driver

from headwater.errors import InputError, TransientError
from headwater.sources.errors import LogPurged, SourceError, SourceMisconfigured, SourceProtocolError, UnsupportedTable
from headwater.sources.mongodb.catalog import Collection
from headwater.sources.mongodb.connection import Dsn, require_version, server_errors, translated

DSN = Dsn("mongodb://user:secret@host/shop")


def build(*numbers: int) -> dict[str, Any]:
    return {"version": ".".join(map(str, numbers)), "versionArray": [*numbers, 0]}


@pytest.mark.parametrize("numbers", [(6, 0, 9), (6, 0, 20), (7, 0, 0), (8, 2, 0)])
def test_a_server_that_gives_large_events_in_parts_is_taken(numbers: tuple[int, int, int]) -> None:
    assert require_version(DSN, build(*numbers)) == ".".join(map(str, numbers))


@pytest.mark.parametrize("numbers", [(4, 4, 29), (5, 0, 30), (6, 0, 8), (6, 3, 2)])
def test_one_that_does_not_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(SourceMisconfigured) as refused:
        require_version(DSN, build(*numbers))
    assert "6.0.9" in str(refused.value.next_step)


@pytest.mark.parametrize(
    "error", [driver.AutoReconnect("x"), driver.NetworkTimeout("x"), driver.WaitQueueTimeoutError("x")]
)
def test_a_connection_that_broke_is_tried_again(error: driver.PyMongoError) -> None:
    assert isinstance(translated(error, DSN), TransientError)


@pytest.mark.parametrize(
    "error", [driver.InvalidOperation("a secret"), driver.DocumentTooLarge("a secret"), driver.InvalidName("a secret")]
)
def test_what_no_new_try_mends_is_an_error_for_good(error: driver.PyMongoError) -> None:
    made = translated(error, DSN)
    assert not isinstance(made, TransientError)
    assert isinstance(made, InputError) == isinstance(error, driver.InvalidName)
    assert made.next_step
    assert "secret" not in str(made)


def test_a_cursor_that_a_capped_collection_ran_over_is_opened_again_and_no_gap_of_the_log() -> None:
    made = translated(driver.OperationFailure("x", 136, {"codeName": "CappedPositionLost"}), DSN)
    assert isinstance(made, TransientError)
    assert isinstance(translated(driver.OperationFailure("x", 286), DSN), LogPurged)


def test_a_shard_that_is_added_is_tried_again_and_one_that_is_gone_is_a_gap_that_is_not_called_a_short_oplog() -> None:
    assert isinstance(translated(driver.OperationFailure("x", 50865), DSN), TransientError)
    removed = {"errmsg": "Change stream events no more available due to removed shard"}
    made = translated(driver.OperationFailure("x", 286, removed), DSN)
    assert isinstance(made, LogPurged)
    assert "a shard was removed" in str(made)
    assert "oplog" not in str(made)


def test_an_answer_that_cannot_be_read_is_an_error_of_ours() -> None:
    with pytest.raises(SourceProtocolError) as found, server_errors(DSN):
        raise InvalidBSON("of a value")
    assert isinstance(found.value, SourceError)
    assert "of a value" not in str(found.value)


def test_an_address_by_a_name_of_a_service_is_shown_as_one() -> None:
    assert str(Dsn("mongodb+srv://user:secret@shop.example.net/shop")) == "mongodb+srv://user@shop.example.net/shop"


def test_a_capped_collection_needs_a_server_whose_snapshots_show_it() -> None:
    capped = Collection.of("shop", {"name": "events", "options": {"capped": True, "size": 4096}})
    plain = Collection.of("shop", {"name": "orders", "options": {}})
    for version in ([8, 0, 0, 0], [8, 2, 1, 0]):
        capped.require_history(version)
    plain.require_history([6, 0, 9, 0])
    with pytest.raises(UnsupportedTable, match="capped") as refused:
        capped.require_history([7, 0, 5, 0])
    assert "8.0" in str(refused.value.next_step)
