"""A controller's end and its executors, and messages to send, for the tests of this folder."""

from __future__ import annotations

import asyncio

import numpy as np

from llamarl_hpc.channels.messages import Heartbeat, Hello, ToController, Trained
from llamarl_hpc.channels.zmq import ControllerChannel, ExecutorChannel
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.run_dir import RunDir

CONFIG = ChannelConfig(heartbeat_s=0.1, max_message_mb=1)


class Setup:
    """A controller and a way to connect executors to it without blocking the loop."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.controller = ControllerChannel.bind(run, CONFIG, attempt=3, one_host=True)
        self.executors: list[ExecutorChannel] = []

    async def connect(
        self, executor: str, instance: str = "1", *, expected: bool = True, timeout_s: float = 20.0
    ) -> ExecutorChannel:
        if expected:
            self.controller.expect(executor, instance)
        channel = await asyncio.to_thread(
            ExecutorChannel.connect, self.run, executor, instance, CONFIG, timeout_s
        )
        self.executors.append(channel)
        return channel

    async def close(self) -> None:
        for channel in self.executors:
            await asyncio.to_thread(channel.close)
        await self.controller.close()


def hello(executor: str = "trainer") -> Hello:
    return Hello(executor=executor, attempt=3, host="here", pids=[1])


def trained(step: int, size: int = 1000) -> Trained:
    logprobs = np.full(size, step, dtype=np.float32)
    return Trained(step=step, version=step + 1, metrics={"loss": 0.25}, logprobs=logprobs)


async def next_message(
    controller: ControllerChannel, timeout_s: float = 10.0
) -> tuple[str, ToController | ChannelError]:
    """The next that is no heartbeat."""
    async with asyncio.timeout(timeout_s):
        while True:
            executor, message = await controller.receive()
            if not isinstance(message, Heartbeat):
                return executor, message


async def nothing_arrives(controller: ControllerChannel, seconds: float = 0.3) -> bool:
    try:
        await next_message(controller, seconds)
    except TimeoutError:
        return True
    return False
