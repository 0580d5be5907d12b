"""Both ends, through real sockets: all that is sent arrives in order, or its loss is noticed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from channel_setup import Setup, hello, next_message, nothing_arrives, trained

from llamarl_hpc.channels.address import write_address
from llamarl_hpc.channels.messages import Scored, Stop, Train, Trained
from llamarl_hpc.channels.zmq import ExecutorChannel
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import TrainBatch


async def test_messages_with_arrays_travel_both_ways(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    assert channel.attempt == 3
    channel.send(hello())
    assert await next_message(setup.controller) == ("trainer", hello())

    batch = TrainBatch(
        step=4,
        temperature=0.7,
        prompt_ids=np.arange(50, dtype=np.int32),
        prompt_lengths=np.array([50], dtype=np.int32),
        group_index=np.zeros(2, dtype=np.int32),
        completion_ids=np.arange(9, dtype=np.int32),
        completion_lengths=np.array([4, 5], dtype=np.int32),
        logprobs=np.linspace(-1, 0, 9, dtype=np.float32),
        loss_mask=np.arange(9) % 2 == 0,
        advantages=np.array([1, -1], dtype=np.float32),
    )
    await setup.controller.send("trainer", Train(batch=batch))
    got = await asyncio.to_thread(channel.receive, 10.0)
    assert isinstance(got, Train)
    for name in batch.__struct_fields__:
        np.testing.assert_array_equal(getattr(got.batch, name), getattr(batch, name))

    logprobs = np.linspace(0, 1, 9, dtype=np.float32)
    channel.send(Trained(step=4, version=5, metrics={"loss": 0.1}, logprobs=logprobs))
    logprobs[:] = 7  # the channel has its own copy
    _, back = await next_message(setup.controller)
    assert isinstance(back, Trained)
    np.testing.assert_array_equal(back.logprobs, np.linspace(0, 1, 9, dtype=np.float32))


async def test_hundreds_of_messages_of_several_executors_arrive_in_order(setup: Setup) -> None:
    names = ["trainer", "generator.0", "generator.1"]
    channels = {name: await setup.connect(name) for name in names}
    for step in range(200):
        for channel in channels.values():
            channel.send(trained(step))
    steps: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(600):
        executor, message = await next_message(setup.controller)
        assert isinstance(message, Trained) and message.logprobs[-1] == message.step
        steps[executor].append(message.step)
    assert all(seen == list(range(200)) for seen in steps.values())


async def test_two_runs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    setups = [Setup(RunDir.create_at(tmp_path / name)) for name in ("a", "b")]
    for number, setup in enumerate(setups):
        channel = await setup.connect("trainer")
        channel.send(trained(number))
    for number, setup in enumerate(setups):
        _, message = await next_message(setup.controller)
        assert isinstance(message, Trained) and message.step == number
        assert await nothing_arrives(setup.controller, 0.2)
        await setup.close()


class Proxy:
    """Stands between executor and controller, to cut or swallow what passes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.swallow = False
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += [writer, other_writer]
        self.tasks += [
            asyncio.create_task(self.pump(reader, other_writer)),
            asyncio.create_task(self.pump(other_reader, writer)),
        ]

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.swallow:
                writer.write(data)
        writer.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers = []

    def close(self) -> None:
        self.cut()
        self.server.close()
        for task in self.tasks:
            task.cancel()


async def connect_through(setup: Setup, proxy: Proxy) -> ExecutorChannel:
    port = await proxy.start()
    write_address(setup.run, msgspec.structs.replace(setup.controller.address, port=port))
    return await setup.connect("trainer")


async def test_a_cut_connection_is_made_again_and_nothing_is_lost(setup: Setup) -> None:
    proxy = Proxy(setup.controller.address.port)
    channel = await connect_through(setup, proxy)
    channel.send(trained(1))
    await next_message(setup.controller)
    await setup.controller.send("trainer", Stop(reason="1"))
    assert await asyncio.to_thread(channel.receive, 10.0) == Stop(reason="1")
    proxy.cut()
    await asyncio.sleep(0.5)
    channel.send(trained(2))
    _, message = await next_message(setup.controller)
    assert isinstance(message, Trained) and message.step == 2
    await setup.controller.send("trainer", Stop(reason="2"))
    assert await asyncio.to_thread(channel.receive, 10.0) == Stop(reason="2")
    proxy.close()


async def test_messages_that_a_dying_connection_swallows_are_noticed(setup: Setup) -> None:
    proxy = Proxy(setup.controller.address.port)
    channel = await connect_through(setup, proxy)
    channel.send(trained(1))
    await next_message(setup.controller)
    proxy.swallow = True
    channel.send(Scored(groups=[]))
    await setup.controller.send("trainer", Stop(reason="lost"))
    await asyncio.sleep(0.3)
    proxy.swallow = False
    proxy.cut()
    executor, message = await next_message(setup.controller)
    assert executor == "trainer" and isinstance(message, ChannelError)
    assert "swallowed" in str(message)
    with pytest.raises(ChannelError, match="swallowed"):
        await asyncio.to_thread(receive_until_error, channel)
    proxy.close()


def receive_until_error(channel: ExecutorChannel) -> None:
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        channel.receive(1.0)
