"""A controller without a run, for tests of its job alone: starts a step on every component, then
waits until something ends the attempt, "writes a checkpoint" and is continued like a real one.

Started by the batch script as `python idle_run.py RUN_DIR`; what happened is in run.json.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from accounting import wait_for

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller import signals
from llamarl_hpc.controller.deadline import Deadline
from llamarl_hpc.controller.ending import Ending, JobAround
from llamarl_hpc.errors import LlamarlError
from llamarl_hpc.launch.allocation import inside_allocation
from llamarl_hpc.launch.continuation import check_wanted, continue_run, started_by
from llamarl_hpc.launch.own_job import OwnJob
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

ROLES = ("trainer", "generator", "reward")


def save(run: RunDir, entry: dict[str, Any]) -> None:
    info = run.read_info()
    others = [a for a in info.get("attempts", []) if a["number"] != entry["number"]]
    write_json(run.run_json, {**info, "attempts": [*others, entry]})


async def why_it_ends(run: RunDir, job: OwnJob) -> str:
    """The first reason that is more than a signal's name."""
    reasons: asyncio.Queue[str] = asyncio.Queue()
    around = JobAround(look=job.look, kill_wait_s=job.kill_wait_s(), component_names=ROLES)
    ending = Ending(
        Deadline(margin_s=1.0),
        job=around,
        poll_s=0.5,
        stop_file=run.stop_requested,
        stop=reasons.put_nowait,
        leave=reasons.put_nowait,
        is_saving=lambda: False,
        is_waiting=lambda: True,
    )
    with signals.heard_by(lambda name: ending.look_soon()):
        watch = asyncio.create_task(ending.watch())
        try:
            return await reasons.get()
        finally:
            watch.cancel()


def main(run: RunDir) -> None:
    signals.ignore()  # until they are listened to
    job = OwnJob.find(os.environ)
    assert job is not None
    config, by = Config(), started_by(run, job)
    check_wanted(run, config, by)
    step = int((run.path / "step").read_text()) if (run.path / "step").exists() else 0
    entry: dict[str, Any] = {
        "number": run.next_attempt(),
        "started": time.time(),
        "started_by": by,
        "job_id": job.job_id,
        "resumed_from_step": step,
        "outcome": "running",
        "reason": "",
    }
    env = inside_allocation(os.environ)
    one = ["-N1", "-n1", "--mem=0", "--mpi=none", "--kill-on-bad-exit=1"]
    one += ["sh", "-c", 'touch "$0" && exec sleep 600']
    signs = [run.path / f"{entry['number']}.{role}" for role in ROLES]
    steps = [
        subprocess.Popen(["srun", f"--het-group={k}", *one, str(sign)], env=env)
        for k, sign in enumerate(signs)
    ]
    wait_for(60.0, "steps on every component", lambda: all(sign.exists() for sign in signs))
    save(run, entry)
    why = asyncio.run(why_it_ends(run, job))
    write_json(run.path / "latest.json", {"step": step + 1})
    (run.path / "step").write_text(str(step + 1))
    for process in steps:
        process.terminate()
    entry |= {"outcome": "stopped", "reason": f"stopped by {why}", "stopped_by": why}
    entry |= {"exit_code": 4, "ended": time.time()}
    try:
        print(continue_run(run, config, entry, job, save))
    finally:
        save(run, entry)


if __name__ == "__main__":
    try:
        main(RunDir(Path(sys.argv[1])))
    except LlamarlError as error:
        sys.exit(str(error))
