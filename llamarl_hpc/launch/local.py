"""A run on this machine: check everything, make the folder, run one attempt, write down how it
ended.

    prepare (model, prompts, MPI: whatever can be wrong is wrong here, before a folder exists)
      -> create_run -> run_attempt (again and again, by `resume`)
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from llamarl_hpc.config.load import load_config, save_resolved
from llamarl_hpc.config.model_checks import check_model, check_replica
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller import signals
from llamarl_hpc.controller.ending import JobAround
from llamarl_hpc.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    ConfigError,
    Continued,
    LlamarlError,
    RunDirError,
    StoppedByAlarm,
    StoppedBySignal,
)
from llamarl_hpc.launch.allocation import allocation
from llamarl_hpc.launch.checkpoint_time import expected_s
from llamarl_hpc.launch.continuation import check_wanted, continue_run, started_by
from llamarl_hpc.launch.doctor.examine import preflight
from llamarl_hpc.launch.own_job import OwnJob
from llamarl_hpc.launch.provenance import describe_software
from llamarl_hpc.launch.starter import Starter, find_starter, is_one_host, make_launcher
from llamarl_hpc.models.load import CONFIG, context_length, read_json, resolve_model
from llamarl_hpc.placement import executor_names, role_of
from llamarl_hpc.prompts.dataset import PromptSets, load_prompts
from llamarl_hpc.rewards.pool import check_rewards
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

if TYPE_CHECKING:
    from llamarl_hpc.controller.loop import Controller

log = logging.getLogger(__name__)
_LOCK_WAIT_S = 120.0

# What may change between attempts: nothing that says which prompts, draws or losses come next.
CHANGEABLE_KEYS = (
    "trainer.max_steps",
    "trainer.save_steps",
    "trainer.save_total_limit",
    "trainer.eval_steps",
    "trainer.learning_rate",
    "trainer.micro_batch_tokens",
    "trainer.zero_stage",
    "trainer.offload_optimizer",
    "trainer.offload_parameters",
    "trainer.dtype",
    "trainer.gradient_checkpointing",
    "trainer.save_in_background",
    "trainer.save_best",
    "algorithm.max_staleness",
    "algorithm.in_flight_weight_updates",
    "generator.",
    "evaluation.",
    "weight_sync.",
    "storage.",
    "logging.",
    "alarms.",
    "channels.",
    "launch.",
    "reward_pool.",
    "reference.placement",
    "reference.offload",
    "reference.micro_batch_tokens",
    "resources.",
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that was checked."""

    config: Config
    model_folder: Path
    prompts: PromptSets
    starter: Starter | None  # None: it will be found where the run takes place


def prepare(config: Config, *, elsewhere: bool = False) -> Prepared:
    """Check what the config names and, unless the run takes place `elsewhere`, what starts
    executors here. Raises ConfigError; makes nothing but the model cache."""
    starter = None if elsewhere else find_starter(config, os.environ)
    check_rewards(config)
    model_folder = resolve_model(config.model.path)
    check_model(config, context_length(model_folder))
    check_replica(config, read_json(model_folder / CONFIG))
    check_reference(config, model_folder)
    return Prepared(
        config=config,
        model_folder=model_folder,
        prompts=load_prompts(config, model_folder),
        starter=starter,
    )


def check_reference(config: Config, model_folder: Path) -> None:
    """Raise ConfigError when the reference of the KL term is no model, or of another vocabulary."""
    if config.algorithm.beta == 0.0 or config.reference.path is None:
        return
    folder = resolve_model(config.reference.path, key="reference.path")
    sizes = [read_json(path / CONFIG).get("vocab_size") for path in (folder, model_folder)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference.path {config.reference.path} has a vocabulary of {sizes[0]} tokens but the "
            f"model one of {sizes[1]}; give a model of the same family"
        )


def create_run(prepared: Prepared, run_dir: Path | None) -> RunDir:
    """A new run folder with the resolved config and run.json."""
    config = prepared.config
    run = (
        RunDir.create_at(run_dir)
        if run_dir is not None
        else RunDir.create(config.runs_dir, config.name)
    )
    write_json(
        run.run_json,
        {
            "run_id": run.path.name,
            "name": config.name,
            "created": time.time(),
            "command": sys.argv,
            **describe_software(prepared.model_folder),
            "data": prepared.prompts.skipped.sentences(),
            "attempts": [],
        },
    )
    # Rollouts are stored as token ids: the folder must be readable without the model, years later.
    shutil.copyfile(prepared.model_folder / "tokenizer.json", run.path / "tokenizer.json")
    save_resolved(config, run.config)
    return run


def changed_config(run: RunDir, overrides: Sequence[str]) -> Config:
    """The run's config with `resume --set ...` applied; nothing is written yet.

    Raises ConfigError for keys that are fixed.
    """
    config = load_config(run.config, overrides)
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not any(key == c or (c.endswith(".") and key.startswith(c)) for c in CHANGEABLE_KEYS):
            raise ConfigError(
                f"--set {key} cannot change in a run that has begun, because its prompts or "
                "draws would no longer be the same; start a new run instead"
            )
    return config


def is_complete(run: RunDir, config: Config) -> bool:
    """Whether the run came to its end and `config` asks for no step more than it made."""
    last = (run.read_info().get("attempts") or [{}])[-1]
    made = load_config(run.config).trainer.max_steps
    return last.get("outcome") == "done" and config.trainer.max_steps <= made


def run_attempt(
    run: RunDir, prepared: Prepared, *, force_plain: bool = False, requeue: bool = False
) -> None:
    """Start the next attempt and see it through. Raises what ended it; run.json says so too.

    With `requeue` this is a batch script that goes on in the same folder when it is started again:
    what can be continued is, by Slurm, and `Continued` is raised.
    """
    starter, around = prepared.starter, allocation(os.environ)
    assert starter is not None, "this was prepared for another machine"
    job = OwnJob.find(os.environ)
    by = started_by(run, job if requeue else None)
    with _only_controller(run, wait_s=_LOCK_WAIT_S if by else 0.0):
        check_wanted(run, prepared.config, by)
        save_resolved(prepared.config, run.config)  # with what a resume changed
        attempt = run.next_attempt()
        _log_to(run, attempt, prepared.config.logging.level)
        entry: dict[str, Any] = {
            "number": attempt,
            "started": time.time(),
            "started_by": by,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job_id": around.job_id if around is not None else None,
            "resumed_from_step": None,  # not known before the checkpoints were read
            "max_staleness": prepared.config.algorithm.max_staleness,
            "outcome": "running",
            "reason": "",
        }
        failure = _see_through(run, prepared, starter, job, entry, force_plain)
        after = ""
        try:
            if requeue and job is not None:
                after = continue_run(run, prepared.config, entry, job, _save_attempt)
        finally:
            _save_end(run, entry)
        if after:
            raise Continued(f"{str(failure).splitlines()[0]}; {after}") from failure
        if failure is not None:
            raise failure


def _see_through(
    run: RunDir,
    prepared: Prepared,
    starter: Starter,
    job: OwnJob | None,
    entry: dict[str, Any],
    force_plain: bool,
) -> BaseException | None:
    """Run the attempt, put into `entry` how it ended, and return what ended it."""
    from llamarl_hpc.controller.assemble import assemble

    controllers: list[Controller] = []
    # only the end of a job is worth finding out how long a checkpoint takes before one is made
    checkpoint_s = 0.0 if job is None else expected_s(prepared.config, prepared.model_folder, run)

    async def go() -> None:
        controller = assemble(
            prepared.config,
            run,
            entry["number"],
            prompts=prepared.prompts,
            launcher=make_launcher(starter, prepared.config, run, entry["number"]),
            one_host=is_one_host(starter),
            job=None if job is None else _around(job, prepared.config),
            checkpoint_s=checkpoint_s,
            force_plain=force_plain,
        )
        controllers.append(controller)
        entry["resumed_from_step"] = controller.state.step
        _save_attempt(run, entry)
        await controller.run()

    failure: BaseException | None = None
    try:
        if prepared.config.launch.preflight:
            preflight(prepared.config, run, entry["number"], starter, prepared.model_folder)
        _run(go())
        entry |= {"outcome": "done", "exit_code": EXIT_OK}
    except LlamarlError as error:
        failure, stopped = error, error.exit_code == EXIT_STOPPED
        entry |= {
            "outcome": "stopped" if stopped else "failed",
            "reason": str(error),
            "exit_code": error.exit_code,
        }
    except (KeyboardInterrupt, SystemExit):  # before the controller could listen to signals
        failure = StoppedBySignal("stopped by a signal before anything was started")
        entry |= {"outcome": "stopped", "reason": str(failure), "exit_code": EXIT_STOPPED}
    except BaseException as error:
        failure = error
        entry |= {"outcome": "failed", "reason": repr(error), "exit_code": 1}
    entry["stopped_by"] = controllers[0].stop_reason if controllers else ""
    if isinstance(failure, StoppedByAlarm):
        entry["stopped_by"] = "an alarm"
    entry["ended"] = time.time()
    return failure


def _around(job: OwnJob, config: Config) -> JobAround:
    roles = dict.fromkeys(role_of(name) for name in executor_names(config))
    return JobAround(look=job.look, kill_wait_s=job.kill_wait_s(), component_names=tuple(roles))


def _save_end(run: RunDir, entry: dict[str, Any]) -> None:
    try:
        _save_attempt(run, entry)
    except OSError as error:  # a full disk must not hide what ended the attempt
        log.warning("%s does not say how this attempt ended: %s", run.run_json, error)


def _run(attempt: Coroutine[Any, Any, None]) -> None:
    """See an attempt through. From its end on signals are ignored: what is left to write down
    takes a moment, and an impatient Ctrl-C must not cost it."""
    try:
        asyncio.run(attempt)
    finally:
        signals.ignore()


def _save_attempt(run: RunDir, entry: dict[str, Any]) -> None:
    info = run.read_info()
    others = [a for a in info.get("attempts", []) if a["number"] != entry["number"]]
    write_json(run.run_json, {**info, "attempts": [*others, entry]})


@contextmanager
def _only_controller(run: RunDir, wait_s: float) -> Iterator[None]:
    """One controller per run folder; the lock goes with the process, however it ends. A job that
    was started again may have to wait for what is left of its last start."""
    lock = FileLock(run.lock)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout as error:
        last = (run.read_info().get("attempts") or [{}])[-1]
        raise RunDirError(
            f"{run.path} is in use by a controller (pid {last.get('pid', '?')} on "
            f"{last.get('host', '?')}); wait for it or stop it first"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _log_to(run: RunDir, attempt: int, level: str) -> None:
    logging.raiseExceptions = False  # a full disk is told once, not at every line
    handler = logging.FileHandler(run.log(attempt, "controller", 0))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("llamarl_hpc")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
