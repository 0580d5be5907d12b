"""An executor's end, through real sockets: its waits, its heartbeats, its search and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import zmq
from channel_setup import CONFIG, Setup, hello, next_message, trained

from llamarl_hpc.channels.address import ControllerAddress, read_address, write_address
from llamarl_hpc.channels.messages import Heartbeat, Trained
from llamarl_hpc.channels.zmq import ExecutorChannel
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.run_dir import RunDir


async def test_receive_without_a_message_returns_after_its_limit(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    start = time.monotonic()
    assert channel.receive(0) is None
    assert time.monotonic() - start < 0.05
    assert await asyncio.to_thread(channel.receive, 0.3) is None
    assert 0.25 < time.monotonic() - start < 2.0


async def test_too_large_a_message_is_refused_at_the_sender(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    with pytest.raises(ChannelError, match="max_message_mb"):
        channel.send(trained(1, size=1 << 18))
    channel.send(trained(2))
    assert (await next_message(setup.controller))[0] == "trainer"


async def test_heartbeats_go_on_while_the_main_thread_computes(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    channel.set_activity("train step 12")

    def compute() -> None:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(1000))

    busy = asyncio.create_task(asyncio.to_thread(compute))
    beats = []
    while not busy.done():
        executor, message = await setup.controller.receive()
        assert executor == "trainer" and isinstance(message, Heartbeat)
        beats.append(message)
    sequences = [beat.sequence for beat in beats]
    assert sequences == list(range(1, len(beats) + 1)) and len(beats) >= 5
    assert beats[-1].activity == "train step 12"
    assert setup.controller.silent_s("trainer") < 1.0


async def test_a_silent_controller_shows_at_the_executor(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    await asyncio.sleep(0.5)
    assert channel.controller_silent_s < 0.4
    time.sleep(0.8)  # the controller's loop stands still
    assert channel.controller_silent_s > 0.5


async def test_what_is_queued_at_close_still_arrives(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    for step in range(50):
        channel.send(trained(step, size=100_000))
    await asyncio.to_thread(channel.close)
    with pytest.raises(ChannelError, match="closed"):
        channel.send(trained(1))
    channel.close()
    last = 0
    while last < 49:
        _, message = await next_message(setup.controller)
        assert isinstance(message, Trained)
        last = message.step


async def test_close_does_not_hang_when_the_other_side_is_gone(run: RunDir) -> None:
    setup = Setup(run)
    channel = await setup.connect("trainer")
    await setup.controller.close()
    channel.send(trained(1))
    start = time.monotonic()
    await asyncio.to_thread(channel.close)
    assert time.monotonic() - start < 6.0


def test_an_executor_without_controller_gives_up_and_says_where_it_looked(run: RunDir) -> None:
    with pytest.raises(ChannelError, match=r"within 0\.5 s \(no address file .*controller\.json"):
        ExecutorChannel.connect(run, "trainer", "1", CONFIG, 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        public, secret = (key.decode() for key in zmq.curve_keypair())
        address = ControllerAddress(
            addresses=["127.0.0.1"],
            port=taken.getsockname()[1],
            attempt=1,
            token="t",
            pid=1,
            host=socket.gethostname(),
            server_public=public,
            client_public=public,
            client_secret=secret,
        )
        write_address(run, address)
        start = time.monotonic()
        expected = rf"tcp://127\.0\.0\.1:{address.port}: nobody listens there"
        with pytest.raises(ChannelError, match=expected):
            ExecutorChannel.connect(run, "trainer", "1", CONFIG, 1.0)
        assert time.monotonic() - start < 4.0


CONTROLLER = """
import asyncio, sys
from llamarl_hpc.channels.zmq import ControllerChannel
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.run_dir import RunDir

async def main():
    run = RunDir(__import__("pathlib").Path(sys.argv[1]))
    channel = ControllerChannel.bind(run, ChannelConfig(heartbeat_s=0.1), attempt=1, one_host=True)
    channel.expect("trainer", "1")
    while True:
        await channel.receive()

asyncio.run(main())
"""


async def test_executors_outlive_no_controller_and_find_the_next_one(run: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(run.path)])
    channel = await asyncio.to_thread(ExecutorChannel.connect, run, "trainer", "1", CONFIG, 60.0)
    await asyncio.sleep(0.4)
    assert channel.controller_silent_s < 0.4
    process.kill()
    process.wait()
    await asyncio.sleep(0.6)
    assert channel.controller_silent_s > 0.5
    assert read_address(run) is not None  # stale: kill -9 leaves it behind

    early = asyncio.create_task(
        asyncio.to_thread(ExecutorChannel.connect, run, "generator.0", "1", CONFIG, 30.0)
    )
    await asyncio.sleep(0.5)
    setup = Setup(run)
    setup.controller.expect("generator.0", "1")
    setup.executors += [channel, await early]
    (await early).send(hello("generator.0"))
    assert await next_message(setup.controller) == ("generator.0", hello("generator.0"))
    assert channel.controller_silent_s > 0.5  # the old keys open nothing at the new controller
    await setup.close()


async def test_a_signal_is_told_at_once_and_only_once(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    os.write(channel.signal_fd, bytes([signal.SIGTERM]))  # as the interpreter's handler does
    named = []
    async with asyncio.timeout(10.0):
        while len(named) < 10:
            _, message = await setup.controller.receive()
            assert isinstance(message, Heartbeat)
            named.append(message.signal)
    assert named.count("SIGTERM") == 1 and set(named) == {"", "SIGTERM"}
