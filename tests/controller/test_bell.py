"""Waiting for a condition: woken by a ring, bounded by a deadline."""

import asyncio

from llamarl_hpc.controller.bell import Bell


async def test_a_ring_wakes_a_waiter_whose_condition_became_true() -> None:
    bell, box = Bell(), []
    waiter = asyncio.create_task(bell.until(lambda: bool(box), timeout_s=5))
    await asyncio.sleep(0)
    bell.ring()  # nothing has changed: the waiter goes on waiting
    await asyncio.sleep(0.01)
    assert not waiter.done()
    box.append(1)
    bell.ring()
    assert await waiter


async def test_a_deadline_ends_the_wait_with_false() -> None:
    assert not await Bell().until(lambda: False, timeout_s=0.01)


async def test_a_true_condition_does_not_wait() -> None:
    assert await Bell().until(lambda: True, timeout_s=0)
