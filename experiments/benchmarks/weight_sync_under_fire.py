"""Replicas that are killed in the middle of a transfer: nobody hangs, nobody mixes versions.

    python experiments/benchmarks/weight_sync_under_fire.py [--kills 50] [--transport collective]

One trainer publishes to two replicas. One of them kills itself (SIGKILL) while a bucket that was
drawn by lot is under way. The other one must either hold the new version whole or keep the old
one; its checksum and its log-probs are compared with the true weights of the version that it
claims. Then the same version goes to the survivor alone, as a controller would have it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync import collective_receiver, shared_memory_receiver
from llamarl_hpc.weight_sync.base import StagedWeights, WeightReceiver
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver

MEMBERS = [SyncMember(executor=f"generator.{k}") for k in range(2)]
TRANSPORTS = ["collective", "shared_memory"]
LIMIT_S = 120.0  # for any one step; a hang, and not a slow machine


class Trainer:
    """A `WeightSource`: a small Llama whose weights change with the version."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
        self.model = LlamaForCausalLM(config).eval()
        self.base = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.specs = [
            ParameterSpec(name=n, shape=tuple(t.shape), dtype="float32")
            for n, t in self.base.items()
        ]
        self.tensors = self.base
        self.ids = torch.randint(0, 2048, (1, 24))

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in self.base.items()
        }

    @torch.no_grad()
    def logprobs(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.func.functional_call(self.model, tensors, (self.ids,))
        return torch.as_tensor(out.logits).log_softmax(-1)

    def parameter_specs(self) -> list[ParameterSpec]:
        return self.specs

    def owned_range(self, name: str) -> tuple[int, int] | None:
        return None

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        return self.tensors[name].reshape(-1)[start:end]


class Scene:
    """Trainer and survivor live in this process, those that die in forks of another one."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.config = _config(transport)
        run = RunDir.create_at(folder)
        self.trainer = Trainer()
        self.publisher = make_publisher(run, self.config, World(), self.trainer, "cpu")
        self.survivor = make_receiver(run, self.config, "generator.0", World(), "cpu")
        command = [sys.executable, __file__, "--nursery", str(folder), "--transport", transport]
        self.nursery = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready\n"
        self.held, self.tensors = 0, self.trainer.base  # what the survivor serves
        self.epoch = 0

    def kill_one(self, version: int, after: int) -> bool:
        """One version with a death in it. True if the survivor had it all the same."""
        self.trainer.tensors = self.trainer.weights(version)
        self.epoch += 1
        self._ask(f"{version} {self.epoch} {after} {self.publisher.store_address}")
        self._publish(version, MEMBERS)
        had_it = self.held == version
        self._check(version)
        status = int(self._answer())
        assert status == -signal.SIGKILL, f"the victim ended with {status}"
        self.epoch += 1
        self._publish(version, MEMBERS[:1])
        assert self.held == version, f"version {version} never arrived"
        self._check(version)
        return had_it

    def close(self) -> None:
        self.survivor.close()
        self.publisher.close()
        assert self.nursery.stdin is not None
        self.nursery.stdin.close()
        self.nursery.wait(LIMIT_S)

    def _publish(self, version: int, members: list[SyncMember]) -> None:
        start = time.monotonic()
        self.survivor.start(version, self.epoch, members, self.publisher.store_address)
        self.publisher.publish(version, self.epoch, members)
        stuck_s = time.monotonic() - start
        assert stuck_s < LIMIT_S, f"the trainer was kept for {stuck_s:.1f} s"
        try:
            staged = _wait(self.survivor)
        except WeightSyncError:
            return  # keeps what it has
        self.tensors = {name: tensor.clone() for name, tensor in staged.tensors()}
        self.held = staged.version
        assert staged.checksum == version_checksum(self.trainer.specs, self.tensors)
        staged.release()

    def _check(self, version: int) -> None:
        """What is served is the version that it is said to be, to the bit."""
        assert self.held in (version - 1, version)
        truth = self.trainer.weights(self.held) if self.held else self.trainer.base
        found = version_checksum(self.trainer.specs, self.tensors)
        assert found == version_checksum(self.trainer.specs, truth), "a mixed version is served"
        assert torch.equal(self.trainer.logprobs(self.tensors), self.trainer.logprobs(truth))

    def _ask(self, line: str) -> None:
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(line + "\n")
        self.nursery.stdin.flush()

    def _answer(self) -> str:
        assert self.nursery.stdout is not None
        return self.nursery.stdout.readline()


def _config(transport: str) -> Config:
    block = {"transport": transport, "delta": "auto", "bucket_mb": 1, "timeout_s": LIMIT_S}
    return Config.model_validate({"weight_sync": block})


def _wait(receiver: WeightReceiver) -> StagedWeights:
    deadline = time.monotonic() + LIMIT_S
    while (staged := receiver.poll()) is None:
        assert time.monotonic() < deadline, "the survivor hangs"
        time.sleep(0.002)
    return staged


def nursery(folder: Path, transport: str) -> None:
    """Fork a replica for every line on stdin, and say how it ended."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        version, epoch, after, *address = line.split()
        child = os.fork()
        if child == 0:
            _die_amid(int(after))
            victim = make_receiver(
                RunDir(folder), _config(transport), "generator.1", World(), "cpu"
            )
            victim.start(int(version), int(epoch), MEMBERS, address[0] if address else "")
            time.sleep(LIMIT_S)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _die_amid(after: int) -> None:
    """SIGKILL once so many buckets have begun (so many pieces have been summed)."""
    calls = [0]

    def dying(genuine: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return genuine(*arguments)

        return call

    for module, name in ((collective_receiver, "broadcast"), (shared_memory_receiver, "piece_sum")):
        setattr(module, name, dying(getattr(module, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--transport", choices=["collective", "shared_memory"], default="collective"
    )
    parser.add_argument("--nursery", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.nursery:
        nursery(arguments.nursery, arguments.transport)
        return
    rng, start = random.Random(0), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="under-fire-") as folder:
        scene = Scene(Path(folder) / "run", arguments.transport)
        survived = [scene.kill_one(v, rng.randrange(14)) for v in range(1, arguments.kills + 1)]
        scene.close()
    figures = {
        "kills": len(survived),
        "survivor_had_it_at_once": sum(survived),
        "seconds": time.monotonic() - start,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
