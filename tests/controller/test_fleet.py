"""Executors that die, fall silent or never report: each is told apart, and started again or not."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.channels.messages import Heartbeat, Hello, Stop
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.bell import Bell
from llamarl_hpc.controller.fleet import Fleet, Member
from llamarl_hpc.controller.supervisor import StepCommand, Supervisor
from llamarl_hpc.errors import ChannelError, ExecutorFailed, NotConnectedError
from llamarl_hpc.run_dir import RunDir


class FakeChannel:
    """Knows what it was told; `silent` says for how long an executor has not been heard."""

    def __init__(self) -> None:
        self.instances: dict[str, list[str]] = {}
        self.silent: dict[str, float] = {}
        self.sent: list[tuple[str, object]] = []
        self.refusal: ChannelError | None = None

    def expect(self, executor: str, instance: str) -> None:
        self.instances.setdefault(executor, []).append(instance)

    def forget(self, executor: str) -> None:
        self.silent.pop(executor, None)

    def silent_s(self, executor: str) -> float:
        return self.silent.get(executor, 0.0)

    async def send(self, executor: str, message: object) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append((executor, message))


class Sleepers:
    """A launcher whose executors do nothing at all."""

    def command(self, executor: str, instance: int) -> StepCommand:
        argv = [sys.executable, "-c", "import time; time.sleep(60)", executor, str(instance)]
        return StepCommand(argv=argv, env=dict(os.environ))


class Scene:
    def __init__(self, folder: Path, **settings: Any) -> None:
        config = Config.model_validate({"generator": {"replicas": 2}, **settings})
        run = RunDir.create_at(folder / "run")
        run.next_attempt()
        self.channel, self.losses = FakeChannel(), list[tuple[str, str]]()
        self.supervisor = Supervisor(run, 1, Sleepers())
        self.fleet = Fleet(config, self.channel, self.supervisor, Bell())  # type: ignore[arg-type]
        self.fleet.on_lost = self._lost

    def _lost(self, member: Member, reason: str) -> None:
        self.losses.append((member.name, reason))

    async def up(self) -> None:
        start = asyncio.create_task(self.fleet.start(lambda: False))
        await self.until(lambda: all(self.supervisor.is_running(n) for n in self.fleet.members))
        for name in self.fleet.members:
            self.say_hello(name)
        self.fleet.bell.ring()
        await start

    def say_hello(self, name: str) -> None:
        pid = self.supervisor._steps[name].process.pid
        hello = Hello(executor=name, attempt=1, host=socket.gethostname(), pids=[pid])
        assert self.fleet.hear(name, hello) is False

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)


FAST = {"channels": {"heartbeat_s": 0.02, "heartbeat_timeout_s": 5.0, "startup_timeout_s": 1.0}}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path, **FAST)
    watchers = [
        asyncio.create_task(made.fleet.watch_exits()),
        asyncio.create_task(made.fleet.watch_heartbeats()),
    ]
    yield made
    for watcher in watchers:
        watcher.cancel()
    await made.fleet.stop("the test is over", grace_s=0.0)


async def test_a_silent_replica_is_killed_named_and_started_again(scene: Scene) -> None:
    await scene.up()
    scene.channel.silent["generator.1"] = 6.0
    await scene.until(lambda: scene.losses)
    (loss,) = scene.losses
    assert loss[0] == "generator.1"
    assert loss[1].startswith("generator.1 lost: generator.1 rank 0 on ")
    assert loss[1].endswith("killed: no heartbeat for 6 s")
    await scene.until(lambda: scene.channel.instances["generator.1"] == ["1", "2"])
    assert scene.channel.instances["generator.0"] == ["1"]


async def test_a_replica_that_dies_as_the_attempt_ends_is_not_started_again(scene: Scene) -> None:
    await scene.up()

    async def is_ending() -> bool:
        return True

    scene.fleet.is_ending = is_ending
    scene.supervisor.kill("generator.0")
    await scene.until(lambda: scene.fleet.members["generator.0"].lost)
    assert len(scene.losses) == 1
    assert scene.channel.instances["generator.0"] == ["1"]


async def test_a_signal_at_an_executor_is_told(scene: Scene) -> None:
    await scene.up()
    told = []
    scene.fleet.on_signal = lambda executor, name: told.append((executor, name))
    assert scene.fleet.hear("reward", Heartbeat(sequence=1, signal="SIGTERM"))
    assert scene.fleet.hear("reward", Heartbeat(sequence=2))
    assert told == [("reward", "SIGTERM")]


async def test_a_replica_that_does_not_come_up_again_is_killed_too(scene: Scene) -> None:
    await scene.up()
    scene.supervisor.kill("generator.0")
    await scene.until(lambda: len(scene.losses) == 2)
    assert "died (signal SIGKILL)" in scene.losses[0][1]
    assert "killed: did not report within 1 s (channels.startup_timeout_s)" in scene.losses[1][1]
    await scene.until(lambda: scene.channel.instances["generator.0"] == ["1", "2", "3"])
    await scene.until(lambda: scene.supervisor.is_running("generator.0"))
    scene.say_hello("generator.0")
    await asyncio.sleep(1.2)  # longer than it had to report
    assert len(scene.losses) == 2


async def test_a_message_that_cannot_travel_is_not_taken_for_a_dead_executor(scene: Scene) -> None:
    await scene.up()
    scene.channel.refusal = NotConnectedError("reward is not connected")
    await scene.fleet.send("reward", Stop(reason="x"))  # its death is reported elsewhere
    scene.channel.refusal = ChannelError("Score cannot be encoded")
    with pytest.raises(ChannelError, match="cannot be encoded"):
        await scene.fleet.send("reward", Stop(reason="x"))
    scene.channel.refusal = None


async def test_executors_that_never_report_are_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **FAST)
    scene.supervisor.run.log(1, "trainer", 0).write_text("loading the model\n")
    with pytest.raises(ExecutorFailed) as error:
        await scene.fleet.start(lambda: False)
    assert str(error.value).startswith(f"trainer rank 0 on {socket.gethostname()}: did not report")
    assert "nor did generator.0, generator.1, reward\nloading the model" in str(error.value)
    await scene.fleet.stop("it did not start", grace_s=0.0)


async def test_a_silent_trainer_ends_the_run_and_its_error_says_why(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **FAST)
    await scene.up()
    exits = asyncio.create_task(scene.fleet.watch_exits())
    scene.fleet.fail("trainer", "left a request unanswered for 9 s")
    with pytest.raises(ExecutorFailed, match=r"trainer rank 0 .*killed: left a request unanswered"):
        await asyncio.wait_for(exits, 10)
    await scene.fleet.stop("the trainer is gone", grace_s=0.0)
    assert {name for name, message in scene.channel.sent if isinstance(message, Stop)} == {
        "generator.0",
        "generator.1",
        "reward",
    }


async def test_replicas_are_given_up_one_by_one_and_the_last_one_ends_the_run(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, **FAST, launch={"max_restarts": 0})
    await scene.up()
    exits = asyncio.create_task(scene.fleet.watch_exits())
    scene.supervisor.kill("generator.1")
    await scene.until(lambda: scene.losses)
    assert scene.fleet.members["generator.1"].lost and not exits.done()
    scene.supervisor.kill("generator.0")
    with pytest.raises(ExecutorFailed, match=r"generator.0 rank 0"):
        await asyncio.wait_for(exits, 10)
    await scene.fleet.stop("no generator is left", grace_s=0.0)


async def test_heartbeats_say_what_an_executor_does(scene: Scene) -> None:
    await scene.up()
    assert scene.fleet.hear("trainer", Heartbeat(sequence=1, activity="train step 3"))
    assert scene.fleet.members["trainer"].activity == "train step 3"
