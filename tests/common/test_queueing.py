from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace

import pytest

from common import clock
from common.errors import DeadlineExceeded, Saturated
from common.policy.stages import Route
from common.policy.waiting import Bounds
from common.queueing import Attempt, Queue
from common.types import InferenceRequest, Priority, Shed

REQUEST = InferenceRequest("0" * 32, "m", input_tokens=100, output_tokens=50.0)
FULL = Shed("saturated", 1.0)
ROUTE = Route((), None)


def queue_of(bounds: Bounds) -> Queue:
    return Queue(bounds, lambda route: None)


def wait(queue: Queue, request: InferenceRequest, attempt: Attempt, shed: Shed) -> Coroutine[None, None, Route]:
    return queue.route(request, attempt, shed, clock.now())


class Places:
    """So many places; an attempt takes one."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.order: list[str] = []

    def attempt(self, name: str):
        def once() -> Route | Shed:
            if not self.free:
                return FULL
            self.free -= 1
            self.order.append(name)
            return ROUTE

        return once


async def test_who_waits_goes_when_there_is_a_place_and_in_order() -> None:
    queue, places = queue_of(Bounds()), Places()
    batch = asyncio.create_task(wait(queue, replace(REQUEST, priority=Priority.BATCH), places.attempt("batch"), FULL))
    first = asyncio.create_task(wait(queue, REQUEST, places.attempt("first"), FULL))
    second = asyncio.create_task(wait(queue, REQUEST, places.attempt("second"), FULL))
    await asyncio.sleep(0)
    queue.wake()
    assert places.order == []
    places.free = 2
    queue.wake()
    assert places.order == ["first", "second"]
    assert await first is ROUTE
    assert await second is ROUTE
    places.free = 1
    assert await batch is ROUTE  # noticed by itself
    assert (queue.room.requests, queue.room.tokens) == (0, 0)


async def test_a_client_that_leaves_is_out_at_once() -> None:
    queue, places = queue_of(Bounds()), Places()
    waiting = [asyncio.create_task(wait(queue, REQUEST, places.attempt("x"), FULL)) for _ in range(50)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (queue.room.requests, queue.room.tokens) == (0, 0)
    places.free = 1
    queue.wake()
    assert places.order == []


async def test_one_model_that_is_stuck_does_not_hold_up_another() -> None:
    queue, none, places = queue_of(Bounds()), Places(), Places(1)
    stuck = asyncio.create_task(wait(queue, REQUEST, none.attempt("m"), FULL))
    other = asyncio.create_task(wait(queue, replace(REQUEST, model="n"), places.attempt("n"), FULL))
    assert await other is ROUTE
    assert not stuck.done()
    stuck.cancel()


async def test_the_room_is_bounded_and_so_is_the_wait() -> None:
    queue, places = queue_of(Bounds(max_requests=1, timeout_s=0.1)), Places()
    waiting = asyncio.create_task(wait(queue, REQUEST, places.attempt("x"), FULL))
    await asyncio.sleep(0)
    with pytest.raises(Saturated):
        await wait(queue, REQUEST, places.attempt("y"), FULL)
    with pytest.raises(Saturated) as caught:
        await waiting
    assert caught.value.retry_after_s is not None


async def test_a_deadline_ends_the_wait() -> None:
    queue, places = queue_of(Bounds()), Places()
    with pytest.raises(DeadlineExceeded):
        await wait(queue, replace(REQUEST, deadline_s=0.1), places.attempt("x"), FULL)


async def test_other_bounds_hold_for_who_comes_and_other_times_for_all() -> None:
    queue, places = queue_of(Bounds(max_requests=2)), Places()
    waiting = [asyncio.create_task(wait(queue, REQUEST, places.attempt(str(n)), FULL)) for n in range(2)]
    await asyncio.sleep(0)
    queue.reconfigure(Bounds(max_requests=1))
    with pytest.raises(Saturated):
        await wait(queue, REQUEST, places.attempt("late"), FULL)
    assert not any(task.done() for task in waiting)
    queue.reconfigure(Bounds(max_requests=0))
    assert not queue.takes(FULL)
    queue.reconfigure(Bounds(timeout_s=0.01))
    for task in waiting:
        with pytest.raises(Saturated):
            await task
