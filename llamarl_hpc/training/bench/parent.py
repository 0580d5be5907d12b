"""What both sides of `llamarl-hpc bench train` share: the pipe to the parent, and a watch.

parent                      a side's process
   <------ Ready ------     model loaded, first step made (it is not measured)
   ------- b"go" ----->
   <------ Measured ---     one optimizer step
   ------- (closed) -->     ends
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import msgspec

from llamarl_hpc.training.bench.task import Measured, Ready


class Parent:
    """The parent's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def tell(self, message: Ready | Measured) -> None:
        self._connection.send_bytes(msgspec.json.encode(message))

    def wait_for_go(self) -> None:
        """Ends this process when the parent has no more use for it."""
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)


class Stopwatch:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def measured(self) -> tuple[float, float]:
        return time.perf_counter() - self._start, time.process_time() - self._cpu
