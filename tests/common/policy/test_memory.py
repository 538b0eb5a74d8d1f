from __future__ import annotations

from common.policy.memory import MOST, QUARANTINE_S, SIZE_MEMORY_S, OutOfMemory

A, B = ("r", "c", "a"), ("r", "c", "b")


def test_the_least_size_counts_and_is_forgotten() -> None:
    memory = OutOfMemory()
    memory.ran_out(A, 1000.0, b"1", 0.0)
    memory.ran_out(A, 2000.0, b"2", 1.0)
    memory.ran_out(B, 5000.0, b"3", 1.0)
    assert memory.too_small(999.0, 2.0) == set()
    assert memory.too_small(1000.0, 2.0) == {A}
    assert memory.too_small(9000.0, 2.0) == {A, B}
    assert memory.too_small(9000.0, 1.0 + SIZE_MEMORY_S) == set()
    memory.ran_out(A, 3000.0, b"4", 2.0 + SIZE_MEMORY_S)
    assert memory.too_small(1000.0, 3.0 + SIZE_MEMORY_S) == set()


def test_a_request_is_in_quarantine_after_its_second_time_for_a_while() -> None:
    memory = OutOfMemory()
    assert not memory.suspects
    memory.ran_out(A, 1.0, b"1", 0.0)
    assert memory.suspects
    assert not memory.quarantined(b"1", 0.0)
    memory.ran_out(B, 1.0, b"1", 1.0)
    assert memory.quarantined(b"1", 2.0)
    assert not memory.quarantined(b"2", 2.0)
    assert not memory.quarantined(b"1", 1.0 + QUARANTINE_S)


def test_what_is_remembered_is_bounded() -> None:
    memory = OutOfMemory()
    for i in range(MOST + 10):
        memory.ran_out(("r", "c", str(i)), 1.0, str(i).encode(), 0.0)
    assert len(memory.too_small(1.0, 0.0)) == MOST
    memory.ran_out(("r", "c", "0"), 1.0, b"0", 0.0)
    assert not memory.quarantined(b"0", 0.0)  # its first time is forgotten
