"""Busy seconds: overlapping requests count once, a running one counts so far."""

from llamarl_hpc.controller.busy import BusyClock


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_requests_count_once() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    busy.begin("g", 2)
    clock.now = 3.0
    busy.end("g")
    clock.now = 5.0
    busy.end("g")
    clock.now = 9.0
    assert busy.take("g") == 5.0
    assert busy.take("g") == 0.0


def test_a_request_under_way_counts_up_to_now_and_only_once() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    busy.begin("g")
    clock.now = 2.0
    assert busy.take("g") == 2.0
    clock.now = 3.0
    busy.end("g")
    assert busy.take("g") == 1.0


def test_a_lost_executor_is_not_busy() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    busy.begin("g", 5)
    clock.now = 1.0
    busy.clear("g")
    clock.now = 10.0
    assert busy.take("g") == 1.0
