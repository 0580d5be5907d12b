"""Processes that end, or hang, amid a transfer: nobody else hangs, nobody mixes versions.

    python experiments/benchmarks/weight_sync_under_fire.py [--scene collective] [--kills 50]

    collective       a replica ends while a bucket is under way over gloo
    delta            the same, while what has changed is under way: the survivor's version is then
                     damaged, and it must be sent everything
    shared_memory    a replica ends while it claims a slot, sums it, or copies from it
    trainer          the trainer ends while it writes a slot, or sums it; the next one starts

Where, is drawn by lot. With `--signal STOP` the victim does not end but hangs: the error names it,
and the trainer goes on. After every death each survivor either holds the new version or has kept
the old one: its checksum and its log-probs are compared with the true weights of the version that
it claims. Then, as a controller would have it, the survivor is offered the same version alone.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from weight_sync_victims import MEMBERS, Nursery, Source, sync_config, wait

from llamarl_hpc.channels.messages import SyncMember
from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.weight_sync.checksum import version_checksum
from llamarl_hpc.weight_sync.collective.publisher import CollectivePublisher
from llamarl_hpc.weight_sync.select import make_publisher, make_receiver
from llamarl_hpc.weight_sync.shared_memory.manifest import read_manifest

LIMIT_S = 120.0  # for any one step; a hang, and not a slow machine
VICTIM = "generator.1 rank 0"
PHASES = {  # in which the victim ends
    "collective": ["receive"],
    "delta": ["receive", "apply"],
    "shared_memory": ["claim", "verify", "verify", "copy"],
    "trainer": ["write", "write", "seal", "sum"],
}
NUM_CALLS = {"claim": 1, "receive": 14, "apply": 10, "seal": 2}  # which its end is drawn from,
MOST_CALLS = 30  # and else: about the pieces that the weights have


class Served:
    """What a replica in this process serves, and whether it is what it is said to be."""

    def __init__(self, run: RunDir, source: Source, transport: str, timeout_s: float) -> None:
        self._source = source
        self._receiver = make_receiver(
            run, sync_config(transport, timeout_s), "generator.0", World(), "cpu"
        )
        self.held, self.tensors = 0, source.base
        self.refusal = ""  # why the last version was not taken

    def start(self, version: int, epoch: int, members: list[SyncMember], address: str) -> None:
        self._receiver.start(version, epoch, members, address)

    def take(self) -> None:
        """The version that is on its way, or the old one."""
        self.refusal = ""
        try:
            staged = wait(self._receiver, LIMIT_S)
        except WeightSyncError as error:
            self.refusal = str(error)
            return
        self.tensors = {name: tensor.clone() for name, tensor in staged.tensors()}
        self.held = staged.version
        assert staged.checksum == version_checksum(self._source.specs, self.tensors)
        staged.release()

    def check(self, *versions: int) -> None:
        """One of `versions` is served, to the bit."""
        assert self.held in versions, f"{self.held} is served, not one of {versions}"
        truth = self._source.weights(self.held) if self.held else self._source.base
        found = version_checksum(self._source.specs, self.tensors)
        assert found == version_checksum(self._source.specs, truth), "a mixed version is served"
        assert torch.equal(self._source.logprobs(self.tensors), self._source.logprobs(truth))

    def close(self) -> None:
        self._receiver.close()


class LostReplica:
    """Trainer and survivor live in this process, the replica that ends in the nursery."""

    def __init__(self, folder: Path, scene: str, number: signal.Signals, timeout_s: float) -> None:
        transport = "shared_memory" if scene == "shared_memory" else "collective"
        self._signal = number
        run, config = RunDir.create_at(folder), sync_config(transport, timeout_s)
        self._source = Source(few=scene == "delta")
        self._publisher = make_publisher(run, config, World(), self._source, "cpu")
        self._survivor = Served(run, self._source, transport, timeout_s)
        self._nursery = Nursery(folder, transport, timeout_s)
        self._version = self._epoch = 0

    def strike(self, phase: str, after: int, late: bool) -> tuple[str, bool]:
        """A version in peace, and one with a death in it. Where the victim died, and whether the
        survivor had the version all the same. `late`: the survivor comes when it has died."""
        self._nursery.bear("replica")
        self._offer(MEMBERS)
        assert self._nursery.hear() == "done"
        self._survivor.check(self._version)
        where = self._offer(MEMBERS, late=late, phase=phase, after=after, signal=self._signal)
        had_it = self._survivor.held == self._version
        self._survivor.check(self._version - 1, self._version)
        if self._signal == signal.SIGSTOP:
            self._go_on_beside_it(had_it)
        self._nursery.bury()
        share = self._offer(MEMBERS[:1], again=True)
        self._survivor.check(self._version)
        assert had_it or share == "1.0", f"{share} of a version went to one that held none"
        return where, had_it

    def _go_on_beside_it(self, had_it: bool) -> None:
        """The other one hangs: whoever waits for it says so, and the trainer goes on."""
        assert had_it or VICTIM in self._survivor.refusal, self._survivor.refusal
        if isinstance(self._publisher, CollectivePublisher):
            deadline = time.monotonic() + LIMIT_S
            while not self._publisher.failure:
                assert time.monotonic() < deadline, "nobody misses the one that hangs"
                time.sleep(0.01)
            assert VICTIM in self._publisher.failure, self._publisher.failure
            return
        self._offer(MEMBERS[:1])  # into the other slot
        self._survivor.check(self._version)
        try:
            self._offer(MEMBERS[:1])  # into the one that it reads
        except WeightSyncError as error:
            assert VICTIM in str(error), error
            self._survivor.take()  # nothing

    def _offer(
        self, members: list[SyncMember], *, again: bool = False, late: bool = False, **death: Any
    ) -> str:
        """The next version (`again`: the same) to `members`. Where the death came, if one was
        ordered, else the share of the bytes that went."""
        self._version += not again
        self._epoch += 1
        self._source.tensors = self._source.weights(self._version)
        address = self._publisher.store_address
        if len(members) > 1:
            self._nursery.tell(version=self._version, epoch=self._epoch, address=address, **death)
        if not late:
            self._survivor.start(self._version, self._epoch, members, address)
        start = time.monotonic()
        receipt = self._publisher.publish(self._version, self._epoch, members)
        stuck_s = time.monotonic() - start
        assert stuck_s < LIMIT_S, f"the trainer was kept for {stuck_s:.1f} s"
        said = self._nursery.hear() if death else ""
        if late:
            self._survivor.start(self._version, self._epoch, members, address)
        self._survivor.take()
        assert receipt.sent is not None
        return said.removeprefix("now ") if death else f"{receipt.sent.result(LIMIT_S).share}"

    def close(self) -> None:
        self._survivor.close()
        self._publisher.close()
        self._nursery.close()


class LostTrainer:
    """Two readers live in this process; trainers, one after the other, in the nursery."""

    def __init__(self, folder: Path, scene: str, number: signal.Signals, timeout_s: float) -> None:
        self._run, self._source, self._timeout_s = RunDir.create_at(folder), Source(), timeout_s
        self._signal = number
        self._nursery = Nursery(folder, "shared_memory", timeout_s)
        self._version = 0
        self._left: Path | None = None  # what the last trainer could not remove

    def strike(self, phase: str, after: int, late: bool) -> tuple[str, bool]:
        """A trainer that publishes a version, and dies amid the next one."""
        self._nursery.bear("trainer")
        readers = [
            Served(self._run, self._source, "shared_memory", self._timeout_s) for _ in range(2)
        ]
        self._publish(readers)
        for reader in readers:
            reader.check(self._version)
        manifest = read_manifest(self._run)
        assert manifest is not None
        assert self._left is None or not self._left.exists(), "the dead trainer's file is left"
        self._left = Path(manifest.path)
        where = self._publish(readers, late=late, phase=phase, after=after, signal=self._signal)
        self._nursery.bury()
        for reader in readers:
            reader.check(self._version - 1, self._version)
            reader.close()
        return where, readers[0].held == self._version

    def _publish(self, readers: Sequence[Served], *, late: bool = False, **death: Any) -> str:
        self._version += 1
        order = self._version, 1, MEMBERS, ""
        self._nursery.tell(version=self._version, epoch=1, **death)
        for reader in readers if not late else ():
            reader.start(*order)
        said = self._nursery.hear()
        for reader in readers if late else ():
            reader.start(*order)
        for reader in readers:
            reader.take()
        return said.removeprefix("now ")

    def close(self) -> None:
        self._nursery.close()
        if self._left is not None:
            self._left.unlink(missing_ok=True)  # no trainer comes any more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--scene", choices=list(PHASES), default="collective")
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL")
    arguments = parser.parse_args()
    number = signal.Signals[f"SIG{arguments.signal}"]
    torch.set_num_threads(1)
    rng, start = random.Random(0), time.monotonic()
    scene = LostTrainer if arguments.scene == "trainer" else LostReplica
    # who is killed is missed at once, who hangs at the deadline
    timeout_s = LIMIT_S if number == signal.SIGKILL else 10.0
    died, had_it = Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="under-fire-") as folder:
        stage = scene(Path(folder) / "run", arguments.scene, number, timeout_s)
        for _ in range(arguments.kills):
            phase = rng.choice(PHASES[arguments.scene])
            after = rng.randrange(NUM_CALLS.get(phase, MOST_CALLS))
            late = rng.random() < 0.5 and arguments.scene in ("shared_memory", "trainer")
            where, survived = stage.strike(phase, after, late)
            died[where] += 1
            had_it += survived
        stage.close()
    figures = {
        "kills": sum(died.values()),
        "died_in": dict(died),
        "survivor_had_it_at_once": had_it,
        "seconds": time.monotonic() - start,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
