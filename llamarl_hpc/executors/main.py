"""Every rank of every executor starts here: `python -m llamarl_hpc.executors.main ...`.

Sends its output to its own log file, finds its place, opens the leader's line to the controller,
builds the role and runs it. Whatever goes wrong ends in `<executor>.<rank>.failure.json` beside
the log (the controller reads it for its message) and in the end of the whole world: no rank waits
for one that is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llamarl_hpc.config.load import load_config
from llamarl_hpc.errors import EXIT_EXECUTOR_FAILED, EXIT_USER_ERROR, ConfigError
from llamarl_hpc.executors import signals
from llamarl_hpc.executors.failure import FailureReport
from llamarl_hpc.placement import MARKER, World, detect, device_of, role_of
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_text

if TYPE_CHECKING:
    from llamarl_hpc.executors.base import Context, Executor

log = logging.getLogger("llamarl_hpc")
_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> None:
    """Run one rank; never returns."""
    arguments = _parse(argv)
    _die_with_parent()
    world = World()
    run = RunDir(Path(arguments.run_dir))
    try:
        world = detect()
        _log_to(run.log(arguments.attempt, arguments.executor, world.rank))
        _fail_on_thread_errors(run, arguments, world)
        _run_role(arguments, run, world)
    except BaseException as error:
        _report(run, arguments, world, error)
        world.abort(EXIT_USER_ERROR if isinstance(error, ConfigError) else EXIT_EXECUTOR_FAILED)
    logging.shutdown()
    world.leave()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of an executor (started by the run).")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--executor", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--instance", type=int, required=True)
    return parser.parse_args(argv)


def _die_with_parent() -> None:
    """A rank must not outlive its launcher; signals are the controller's business, not ours."""
    signals.ignore()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _log_to(path: Path) -> None:
    """Send stdout and stderr of this process, C libraries included, to the rank's own file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )


def _run_role(arguments: argparse.Namespace, run: RunDir, world: World) -> None:
    config = load_config(run.config)
    log.setLevel(config.logging.level.upper())
    log.info(
        "%s rank %d of %d on %s, pid %d, cpus %s",
        arguments.executor,
        world.rank,
        world.size,
        world.host,
        os.getpid(),
        sorted(os.sched_getaffinity(0)),
    )
    from llamarl_hpc.channels.zmq import ExecutorChannel
    from llamarl_hpc.executors.base import Context
    from llamarl_hpc.observability.trace import Tracer

    channel = report = None
    if world.is_leader:
        channel = ExecutorChannel.connect(
            run,
            arguments.executor,
            arguments.instance,
            config.channels,
            timeout_s=config.channels.startup_timeout_s,
        )
        report = signals.SignalReport(channel, world, silence_s=config.channels.heartbeat_timeout_s)
        report.install()
    context = Context(
        name=arguments.executor,
        attempt=arguments.attempt,
        instance=arguments.instance,
        run=run,
        config=config,
        world=world,
        device=device_of(config, arguments.executor),
        channel=channel,
        tracer=Tracer(run.trace_file(arguments.attempt, arguments.executor), arguments.executor),
    )
    executor = _build(role_of(arguments.executor), context)
    if report is not None:
        report.install()
    executor.run()
    if channel is not None and report is not None:
        report.close()
        channel.close()


def _build(role: str, context: Context) -> Executor:
    """Import only what the role needs: the reward executor never loads torch."""
    if role == "trainer":
        from llamarl_hpc.executors.trainer import TrainerExecutor

        return TrainerExecutor(context)
    if role == "generator" and not context.world.is_leader:
        from llamarl_hpc.executors.generator_follower import GeneratorFollower

        return GeneratorFollower(context)
    if role == "generator":
        from llamarl_hpc.executors.generator import GeneratorExecutor

        return GeneratorExecutor(context)
    if role == "reference":
        from llamarl_hpc.executors.reference import ReferenceExecutor

        return ReferenceExecutor(context)
    from llamarl_hpc.executors.reward import RewardExecutor

    assert role == "reward", role
    return RewardExecutor(context)


def _report(run: RunDir, arguments: argparse.Namespace, world: World, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    sys.stderr.flush()
    report = FailureReport(
        executor=arguments.executor,
        instance=arguments.instance,
        rank=world.rank,
        host=world.host,
        reason=str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}",
        user_error=isinstance(error, ConfigError),
        traceback=text,
    )
    path = run.attempt(arguments.attempt) / f"{arguments.executor}.{world.rank}.failure.json"
    with contextlib.suppress(OSError):  # a full disk; the log may still have it
        write_text(path, msgspec.json.encode(report).decode())


def _fail_on_thread_errors(run: RunDir, arguments: argparse.Namespace, world: World) -> None:
    """An exception in a background thread ends the rank like one in the main thread."""

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        _report(run, arguments, world, error)
        world.abort(EXIT_EXECUTOR_FAILED)

    threading.excepthook = hook


if __name__ == "__main__":
    assert MARKER in os.environ, "executors are started by 'llamarl-hpc run', not by hand"
    main()
