"""Both ends of the ZeroMQ channel, through real sockets."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from channel_setup import CONFIG, Setup

from llamarl_hpc.channels.address import ControllerAddress, read_address, write_address
from llamarl_hpc.channels.codec import encode
from llamarl_hpc.channels.messages import (
    Heartbeat,
    Hello,
    Scored,
    Stop,
    ToController,
    Train,
    Trained,
)
from llamarl_hpc.channels.zmq import ControllerChannel, ExecutorChannel
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError, ConfigError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.types import TrainBatch


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


async def test_receive_without_a_message_returns_after_its_limit(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    start = time.monotonic()
    assert channel.receive(0) is None
    assert time.monotonic() - start < 0.05
    assert await asyncio.to_thread(channel.receive, 0.3) is None
    assert 0.25 < time.monotonic() - start < 2.0


async def test_keys_are_private_and_new_at_every_start(run: RunDir) -> None:
    run.keys.chmod(0o755)
    first = ControllerChannel.bind(run, CONFIG, one_host=True)
    assert stat.S_IMODE(run.keys.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.address.stat().st_mode) == 0o600
    assert [path.name for path in run.keys.iterdir()] == [run.address.name]
    assert first.address.addresses == ["127.0.0.1"]
    await first.close()
    assert not run.address.exists()
    second = ControllerChannel.bind(run, CONFIG, one_host=True)
    old, new = first.address, second.address
    assert old.client_secret != new.client_secret and old.server_public != new.server_public
    assert old.token != new.token
    await second.close()


async def test_a_closing_controller_leaves_its_successors_address_alone(run: RunDir) -> None:
    first = ControllerChannel.bind(run, CONFIG, one_host=True)
    second = ControllerChannel.bind(run, CONFIG, one_host=True)
    await first.close()
    assert read_address(run) == second.address
    await second.close()


async def test_a_listening_address_that_is_not_ours_is_a_config_error(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"channels\.interface"):
        ControllerChannel.bind(run, ChannelConfig(interface="203.0.113.7"))
    assert not run.address.exists()


def strange_dealer(context: Any, port: int, **keys: bytes) -> Any:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.routing_id = b"trainer#1"
    for name, key in keys.items():
        setattr(dealer, name, key)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send_multipart([(1).to_bytes(8, "big"), *encode(hello())])
    return dealer


async def test_strangers_get_nothing_and_disturb_nothing(setup: Setup) -> None:
    address = setup.controller.address
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    setup.controller.expect("trainer", "1")
    strangers = [
        strange_dealer(context, address.port),
        strange_dealer(
            context,
            address.port,
            curve_serverkey=address.server_public.encode(),
            curve_publickey=public,
            curve_secretkey=secret,
        ),
        strange_dealer(
            context,
            address.port,
            curve_serverkey=public,
            curve_publickey=address.client_public.encode(),
            curve_secretkey=address.client_secret.encode(),
        ),
    ]
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL",
        bytes(9999),
    ):
        with socket.create_connection(("127.0.0.1", address.port)) as raw:
            raw.sendall(garbage)
    held = [socket.create_connection(("127.0.0.1", address.port)) for _ in range(20)]

    assert await nothing_arrives(setup.controller, 0.7)
    assert all(stranger.poll(0) == 0 for stranger in strangers)
    with pytest.raises(ChannelError, match="trainer is not connected"):
        await setup.controller.send("trainer", Stop(reason="secret"))

    channel = await setup.connect("trainer")
    channel.send(hello())
    assert (await next_message(setup.controller))[1] == hello()
    assert all(stranger.poll(0) == 0 for stranger in strangers)
    assert setup.controller.num_refused == 0
    for connection in held:
        connection.close()
    context.destroy(linger=0)


async def test_an_instance_that_nobody_expects_is_not_heard(setup: Setup) -> None:
    intruder = await setup.connect("generator.7", expected=False)
    intruder.send(hello("generator.7"))
    assert await nothing_arrives(setup.controller)
    assert setup.controller.num_refused >= 1


async def test_a_replaced_instance_is_not_heard_and_not_written_to(setup: Setup) -> None:
    old = await setup.connect("generator.1", "1")
    old.send(hello("generator.1"))
    assert await next_message(setup.controller) == ("generator.1", hello("generator.1"))
    setup.controller.expect("generator.1", "2")
    with pytest.raises(ChannelError, match="not connected"):
        await setup.controller.send("generator.1", Stop(reason="x"))
    old.send(trained(1))
    new = await setup.connect("generator.1", "2")
    new.send(trained(2))
    _, message = await next_message(setup.controller)
    assert isinstance(message, Trained) and message.step == 2
    await setup.controller.send("generator.1", Stop(reason="for the new one"))
    assert await asyncio.to_thread(new.receive, 10.0) == Stop(reason="for the new one")
    assert old.receive(0) is None


async def test_too_large_a_message_is_refused_at_the_sender(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    with pytest.raises(ChannelError, match="max_message_mb"):
        channel.send(trained(1, size=1 << 18))
    channel.send(trained(2))
    assert (await next_message(setup.controller))[0] == "trainer"


def insider(context: Any, address: ControllerAddress, identity: bytes) -> Any:
    """A peer with the right keys that sends what it likes."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.routing_id = identity
    dealer.curve_serverkey = address.server_public.encode()
    dealer.curve_publickey = address.client_public.encode()
    dealer.curve_secretkey = address.client_secret.encode()
    dealer.connect(f"tcp://127.0.0.1:{address.port}")
    return dealer


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x" * 8],
        [(1).to_bytes(8, "big")],
        [(1).to_bytes(8, "big"), b"\xc1"],
        [(1).to_bytes(8, "big"), *encode(Stop(reason="wrong side"))],
        [(2).to_bytes(8, "big"), *encode(hello())],
        [(1).to_bytes(8, "big"), b"x" * (1 << 20)],
    ],
)
async def test_a_bad_message_fails_its_executor_and_nobody_else(
    setup: Setup, frames: list[bytes]
) -> None:
    healthy = await setup.connect("trainer")
    setup.controller.expect("reward", "1")
    context = zmq.Context()
    bad = insider(context, setup.controller.address, b"reward#1")
    bad.send_multipart(frames)
    executor, message = await next_message(setup.controller)
    assert executor == "reward" and isinstance(message, ChannelError)
    bad.send_multipart([(2).to_bytes(8, "big"), *encode(hello())])
    assert await nothing_arrives(setup.controller)
    healthy.send(hello())
    assert await next_message(setup.controller) == ("trainer", hello())
    context.destroy(linger=0)


async def test_a_frame_above_the_limit_never_gets_in(setup: Setup) -> None:
    setup.controller.expect("reward", "1")
    context = zmq.Context()
    bad = insider(context, setup.controller.address, b"reward#1")
    bad.send_multipart([(1).to_bytes(8, "big"), b"x" * (8 << 20)])
    assert await nothing_arrives(setup.controller)
    healthy = await setup.connect("trainer")
    healthy.send(hello())
    assert await next_message(setup.controller) == ("trainer", hello())
    context.destroy(linger=0)


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


async def test_a_silent_executor_shows_at_the_controller(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    await asyncio.sleep(0.3)
    assert setup.controller.silent_s("trainer") < 0.3
    channel.close()
    await asyncio.sleep(0.5)
    assert setup.controller.silent_s("trainer") > 0.4
    assert setup.controller.silent_s("nobody") == 0.0


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
