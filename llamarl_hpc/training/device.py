"""Which device a rank computes on."""

from __future__ import annotations

import torch

from llamarl_hpc.placement import World


def own_device(device: str, world: World) -> torch.device:
    """This rank's: `cpu`, or one of the GPUs of its node, which becomes torch's current one."""
    if device != "cuda":
        return torch.device(device)
    index = world.local_rank % torch.cuda.device_count()  # a rank may see only its own GPU
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
