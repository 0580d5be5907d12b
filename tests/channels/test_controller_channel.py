"""The controller's end, through real sockets: who may talk to it, and who is heard."""

from __future__ import annotations

import asyncio
import socket
import stat
from typing import Any

import pytest
import zmq
from channel_setup import CONFIG, Setup, hello, next_message, nothing_arrives, trained

from llamarl_hpc.channels.address import ControllerAddress, read_address
from llamarl_hpc.channels.codec import encode
from llamarl_hpc.channels.messages import Stop, Trained
from llamarl_hpc.channels.zmq import ControllerChannel
from llamarl_hpc.config.schema import ChannelConfig
from llamarl_hpc.errors import ChannelError, ConfigError, NotConnectedError
from llamarl_hpc.run_dir import RunDir


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
    with pytest.raises(NotConnectedError, match="trainer is not connected"):
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


async def test_a_silent_executor_shows_at_the_controller(setup: Setup) -> None:
    channel = await setup.connect("trainer")
    await asyncio.sleep(0.3)
    assert setup.controller.silent_s("trainer") < 0.3
    channel.close()
    await asyncio.sleep(0.5)
    assert setup.controller.silent_s("trainer") > 0.4
    assert setup.controller.silent_s("nobody") == 0.0
