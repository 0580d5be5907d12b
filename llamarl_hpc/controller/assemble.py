"""Put a controller together from a run folder: state, prompts, books, channel, display."""

from __future__ import annotations

import hashlib
import json
import logging

from llamarl_hpc.channels.zmq import ControllerChannel
from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.ending import JobAround
from llamarl_hpc.controller.loop import Controller
from llamarl_hpc.controller.parts import Parts
from llamarl_hpc.controller.reference import ReferenceModels
from llamarl_hpc.controller.state import RunState
from llamarl_hpc.controller.supervisor import Launcher, Supervisor
from llamarl_hpc.observability.metrics_log import MetricsLog
from llamarl_hpc.observability.progress import NotesFromLog, make_progress
from llamarl_hpc.observability.trace import Tracer
from llamarl_hpc.prompts.cursor import PromptCursor
from llamarl_hpc.prompts.dataset import PromptSets
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.checkpoint import CheckpointStore
from llamarl_hpc.storage.rollout_store import RolloutWriter
from llamarl_hpc.storage.rollout_store.encode import MAX_ATTRIBUTE_BYTES

log = logging.getLogger(__name__)


def assemble(
    config: Config,
    run: RunDir,
    attempt: int,
    *,
    prompts: PromptSets,
    launcher: Launcher,
    one_host: bool,
    job: JobAround | None,
    checkpoint_s: float,
    force_plain: bool,
) -> Controller:
    """Called inside the running loop. Continues from the newest valid checkpoint, if any.
    `one_host`: every executor runs beside the controller. `job`: the Slurm job around us.
    `checkpoint_s`: what a checkpoint is expected to take, or 0.

    Raises ConfigError when the checkpoint was made with another data set.
    """
    checkpoints = CheckpointStore(run, config.trainer.save_total_limit)
    progress = make_progress(force_plain=force_plain)
    logging.getLogger("llamarl_hpc").addHandler(NotesFromLog(progress))
    cursor = PromptCursor(prompts.train, seed=config.data.seed, shuffle=config.data.shuffle)
    state = RunState()
    if (checkpoint := checkpoints.latest()) is not None:
        cursor.restore(checkpoint.state["prompts"])
        state = RunState.from_checkpoint(checkpoint.state)
        checkpoints.forget_best_after(state.step)
        progress.note(f"continuing after step {state.step - 1}")
    info = run.read_info()
    parts = Parts(
        channel=ControllerChannel.bind(run, config.channels, attempt=attempt, one_host=one_host),
        supervisor=Supervisor(run, attempt, launcher),
        cursor=cursor,
        heldout=prompts.heldout,
        writer=RolloutWriter(
            run.rollouts,
            attempt=attempt,
            config=config.storage,
            attributes={
                "run_id": str(info.get("run_id", "")),
                "model": config.model.path,
                "model_hash": str(info.get("model_hash", "")),
                "tokenizer_hash": str(info.get("tokenizer_hash", "")),
                "versions": json.dumps(info.get("versions", {}) | {"git": info.get("git", "")}),
                "config": _provenance(run.config.read_text()),
            },
            reward_names=[reward.name or "" for reward in config.rewards],
        ),
        checkpoints=checkpoints,
        references=ReferenceModels(config, run.reference, step=state.step),
        metrics=MetricsLog(run, config.logging, attempt=attempt),
        progress=progress,
        tracer=Tracer(run.trace_file(attempt, "controller"), "controller"),
        job=job,
        stop_file=run.stop_requested,
        checkpoint_s=checkpoint_s,
    )
    return Controller(config, attempt, parts, state)


def _provenance(config: str) -> str:
    """The configuration for every file of rollouts; its hash if it is longer than HDF5 takes."""
    if len(config.encode()) <= MAX_ATTRIBUTE_BYTES:
        return config
    return f"sha256 of config.yaml: {hashlib.sha256(config.encode()).hexdigest()}"
