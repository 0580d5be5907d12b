"""Replicas and trainers that end themselves amid a transfer, for weight_sync_under_fire.py.

A nursery is a process that has imported everything and forks one victim after another. It and its
victim are told what to do by lines of JSON on stdin, and answer in lines of text:

    {"role": "replica"}                                  a victim is born       -> "alive 1234"
    {"version": 3, "epoch": 1, "address": ""}            it takes (publishes) 3 -> "done"
    {"version": 4, ..., "phase": "verify", "after": 2,   it signals itself      -> "now verify"
     "signal": 9}                                        and has ended          -> "-9"

A death has a phase: after `after` calls of what PHASES names or, at the latest, when all is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.config.schema import Config
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import ParameterSpec
from llamarl_hpc.weight_sync.base import StagedWeights, WeightReceiver
from llamarl_hpc.weight_sync.collective import delta
from llamarl_hpc.weight_sync.collective import receiver as collective_receiver
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver
from llamarl_hpc.weight_sync.shared_memory import publisher as shared_memory
from llamarl_hpc.weight_sync.shared_memory import receiver as shared_memory_receiver
from llamarl_hpc.weight_sync.shared_memory.segment import Segment

MEMBERS = [SyncMember(executor=f"generator.{k}") for k in range(2)]
SPARE = 200  # with few changes, one element in so many changes with a version

# What is under way when a victim ends: the calls that are counted.
PHASES: dict[str, tuple[Any, str]] = {
    "receive": (collective_receiver, "broadcast"),  # a bucket, or what has changed of it
    "apply": (delta, "decode"),  # what has changed, to what is held
    "claim": (Segment, "lock_for_reading"),
    "verify": (shared_memory_receiver, "piece_sum"),
    "write": (shared_memory, "copy_piece"),
    "seal": (Segment, "set_version"),
    "sum": (shared_memory, "piece_sum"),
}
_lock = threading.Lock()


class Source:
    """A `WeightSource`: a small Llama whose weights are known for every version.

    With `few`, a version changes one element in SPARE, else all of them.
    """

    def __init__(self, *, few: bool = False) -> None:
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
        self.few = few
        self.model = LlamaForCausalLM(config).eval()
        self.base = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.specs = [
            ParameterSpec(name=n, shape=tuple(t.shape), dtype="float32")
            for n, t in self.base.items()
        ]
        self.tensors = self.base
        self.ids = torch.randint(0, 2048, (1, 24))

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        if self.few:
            return {n: t + 1e-3 * _changes(t.shape, version) for n, t in self.base.items()}
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


def _changes(shape: torch.Size, version: int) -> torch.Tensor:
    """How often each element has changed until `version`."""
    number = torch.arange(shape.numel())
    return ((number + version) // SPARE - number // SPARE).view(shape).float()


def sync_config(transport: str, timeout_s: float) -> Config:
    block = {"transport": transport, "delta": "auto", "bucket_mb": 1, "timeout_s": timeout_s}
    return Config.model_validate({"weight_sync": block})


def wait(receiver: WeightReceiver, limit_s: float) -> StagedWeights:
    deadline = time.monotonic() + limit_s
    while (staged := receiver.poll()) is None:
        assert time.monotonic() < deadline, "a receiver hangs"
        time.sleep(0.002)
    return staged


class Nursery:
    """The other end: a nursery, and the one victim that lives in it."""

    def __init__(self, folder: Path, transport: str, timeout_s: float) -> None:
        command = [sys.executable, __file__, str(folder), transport, f"{timeout_s}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.hear() == "ready"
        self._victim = 0

    def bear(self, role: str) -> None:
        self.tell(role=role)
        word, pid = self.hear().split()
        assert word == "alive"
        self._victim = int(pid)

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def bury(self) -> None:
        """The victim has signalled itself; if that has only stopped it, it is killed now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._victim, signal.SIGKILL)
        assert int(self.hear()) == -signal.SIGKILL

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# ------------------------------------------------------------------ in the nursery


def main(folder: str, transport: str, timeout_s: str) -> None:
    torch.set_num_threads(1)
    config, source = sync_config(transport, float(timeout_s)), Source()
    roles = {"replica": _replica, "trainer": _trainer}
    _say("ready")
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            _say(f"alive {os.getpid()}")
            roles[json.loads(line)["role"]](RunDir(Path(folder)), config, source)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        _say(f"{os.waitstatus_to_exitcode(status)}")


def _replica(run: RunDir, config: Config, source: Source) -> None:
    receiver = make_receiver(run, config, "generator.1", World(), "cpu")
    while line := sys.stdin.readline():
        order = json.loads(line)
        die = _arm(order)
        receiver.start(order["version"], order["epoch"], MEMBERS, order["address"])
        staged = wait(receiver, config.weight_sync.timeout_s)
        for number, (_, tensor) in enumerate(staged.tensors()):
            tensor.clone()
            if order.get("phase") == "copy" and number >= order["after"]:
                die("copy")
        die("the end")
        staged.release()
        _say("done")


def _trainer(run: RunDir, config: Config, source: Source) -> None:
    publisher = make_publisher(run, config, World(), source, "cpu")
    while line := sys.stdin.readline():
        order = json.loads(line)
        source.tensors = source.weights(order["version"])
        die = _arm(order)
        receipt = publisher.publish(order["version"], order["epoch"], MEMBERS)
        assert receipt.sent is not None
        receipt.sent.result(config.weight_sync.timeout_s)
        die("the end")
        _say("done")


def _arm(order: dict[str, Any]) -> Callable[[str], None]:
    """What makes this process signal itself, if the order says so; the calls of its phase will."""
    if "phase" not in order:
        return lambda where: None
    left, phase = [order["after"]], order["phase"]

    def die(where: str) -> None:
        with _lock:  # two threads may get here; the second one waits for ever
            _say(f"now {where}")
            os.kill(os.getpid(), order["signal"])
            time.sleep(3600)

    def dying(genuine: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                die(phase)
            return genuine(*arguments, **named)

        return call

    if phase in PHASES:
        place, name = PHASES[phase]
        setattr(place, name, dying(getattr(place, name)))
    return die


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
