"""A controller's end and its executors, for the tests of this folder."""

from __future__ import annotations

import asyncio

from llamarl_hpc.channels.zmq import ControllerChannel, ExecutorChannel
from llamarl_hpc.config.schema import ChannelConfig
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
