"""Executors whose controller has fallen silent leave, each from the wait that it is in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.executors import generator, reward
from llamarl_hpc.executors.base import Context, Executor
from llamarl_hpc.observability.trace import Tracer
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir


class SilentLine:
    """A line to a controller that is gone; an executor that goes on asking is not leaving."""

    controller_silent_s = 1e6

    def __init__(self) -> None:
        self.asked = 0

    def receive(self, timeout_s: float) -> None:
        self.asked += 1
        assert self.asked < 10, "it does not leave"

    def send(self, message: object) -> None:
        """Into the void."""

    def set_activity(self, text: str) -> None:
        """Nobody sees it."""


def context_of(name: str, line: Any, folder: Path) -> Context:
    return Context(
        name=name,
        attempt=1,
        instance=1,
        run=RunDir(folder),
        config=Config.model_validate({"channels": {"heartbeat_timeout_s": 20.0}}),
        world=World(rank=0, size=1, local_rank=0, local_size=1, host="here", comm=None),
        device="cpu",
        channel=line,
        tracer=Tracer(folder / "trace.jsonl", name),
    )


def idle_generator(context: Context, monkeypatch: pytest.MonkeyPatch) -> Executor:
    engine = SimpleNamespace(num_running=0, num_waiting=0, policy_version=0, parts=lambda: [])
    receiver = SimpleNamespace(ranks=(0,), close=lambda: None)
    monkeypatch.setattr(generator.GeneratorExecutor, "_make_engine", lambda _: engine)
    monkeypatch.setattr(generator, "make_receiver", lambda *_, parts: receiver)
    return generator.GeneratorExecutor(context)


def busy_generator(context: Context, monkeypatch: pytest.MonkeyPatch) -> Executor:
    made = idle_generator(context, monkeypatch)
    vars(made)["engine"].num_running = 1
    monkeypatch.setattr(generator.GeneratorExecutor, "_decode", lambda _: None)
    return made


def idle_reward(context: Context, monkeypatch: pytest.MonkeyPatch) -> Executor:
    pool = SimpleNamespace(start=lambda: None, close=lambda: None)
    monkeypatch.setattr(reward, "RewardPool", lambda _: pool)
    return reward.RewardExecutor(context)


@pytest.mark.parametrize("make", [idle_generator, busy_generator, idle_reward])
def test_an_executor_leaves_once(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = SilentLine()
    make(context_of("some.0", line, tmp_path), monkeypatch).run()
    assert [r.getMessage() for r in caplog.records] == [
        "some.0 leaves: the controller was silent for more than 20 s"
    ]
