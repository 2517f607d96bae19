"""UUIDv7: order, uniqueness, spelling (scenario y)."""

from __future__ import annotations

import threading
import uuid

import pytest

from headwater.journal.errors import InvalidNameError
from headwater.journal.ids import IdGenerator, check_id, created_ms, is_id, new_id


def test_an_id_is_a_version_seven_uuid_with_its_time() -> None:
    made = IdGenerator(clock=lambda: 1_700_000_000_123).new()
    parsed = uuid.UUID(made)
    assert str(parsed) == made
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert created_ms(made) == 1_700_000_000_123


def test_ten_thousand_ids_of_one_millisecond_are_unique_and_ordered() -> None:
    """Scenario y."""
    generator = IdGenerator(clock=lambda: 5)
    made = [generator.new() for _ in range(10_000)]
    assert made == sorted(set(made))
    assert {created_ms(identifier) for identifier in made} == {5}


def test_ids_increase_when_the_clock_steps_back() -> None:
    """Scenario y."""
    times = iter([1000, 1000, 400, 400, 999, 1001])
    generator = IdGenerator(clock=lambda: next(times))
    made = [generator.new() for _ in range(6)]
    assert made == sorted(set(made))
    assert created_ms(made[-1]) == 1001


def test_a_full_counter_moves_to_the_next_millisecond() -> None:
    generator = IdGenerator(clock=lambda: 7, random_bits=lambda count: (1 << count) - 1)
    generator.new()
    generator._counter = (1 << 42) - 2
    made = [generator.new() for _ in range(3)]
    assert made == sorted(set(made))
    assert [created_ms(identifier) for identifier in made] == [7, 8, 8]


def test_a_reseeded_generator_never_repeats_or_goes_below() -> None:
    generator = IdGenerator(clock=lambda: 9)
    before = generator.new()
    generator.reseed()
    assert generator.new() > before


def test_a_fork_that_told_nobody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = IdGenerator(clock=lambda: 9)
    before = generator.new()
    monkeypatch.setattr("os.getpid", lambda: -5)
    assert generator.new() > before
    assert generator._pid == -5


def test_the_same_clock_and_randomness_give_the_same_ids() -> None:
    def run() -> list[str]:
        generator = IdGenerator(clock=lambda: 3, random_bits=lambda count: 42 % (1 << count))
        return [generator.new() for _ in range(5)]

    assert run() == run()


def test_threads_never_get_the_same_id() -> None:
    made: list[str] = []

    def work() -> None:
        mine = [new_id() for _ in range(500)]
        assert mine == sorted(mine)
        made.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 2000


@pytest.mark.parametrize(
    "change", [str.upper, lambda t: t.replace("-", ""), lambda t: t + "\n", lambda t: "{" + t + "}"]
)
def test_only_the_canonical_spelling_is_an_id(change: object) -> None:
    """Scenario cc."""
    assert callable(change)
    made = "0190b0a0-0000-7000-8000-0000000000ab"
    assert is_id(made)
    assert not is_id(change(made))
    with pytest.raises(InvalidNameError):
        check_id(change(made), "session")
    with pytest.raises(InvalidNameError):
        check_id(None, "session")  # type: ignore[arg-type]
