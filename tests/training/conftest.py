"""What the trainer's tests share: a world of one rank, a tiny model folder, one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_policy import save_tiny_model

from llamarl_hpc.placement import World, init_process_group


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and lose much on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """This process as a trainer of one rank, for all tests: DeepSpeed never forgets its group."""
    environment = dict(os.environ)
    world = World()
    init_process_group(world, device="cpu")
    yield world
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
