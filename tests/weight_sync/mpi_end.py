"""How programs under mpiexec end: nobody closes while another one still sends."""

from __future__ import annotations

from typing import Any

from llamarl_hpc.placement import World
from llamarl_hpc.weight_sync.base import WeightPublisher, WeightReceiver


def leave_together(everybody: Any, end: WeightPublisher | WeightReceiver, word: str) -> None:
    """`everybody`: the communicator of all ranks; `end`: this one's. The first rank says `word`."""
    everybody.Barrier()
    end.close()
    everybody.Barrier()
    if everybody.rank == 0:
        print(word, flush=True)
    World(rank=everybody.rank, size=everybody.size, comm=everybody).leave()
