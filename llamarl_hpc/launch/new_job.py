"""A new run as a Slurm job: its folder and its job, or neither."""

from __future__ import annotations

import shutil
from pathlib import Path

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch.checkpoint_time import check_new_run
from llamarl_hpc.launch.local import Prepared, create_run
from llamarl_hpc.launch.run_job import RunJob
from llamarl_hpc.launch.submit import submit_run
from llamarl_hpc.run_dir import RunDir


def submit_new_run(prepared: Prepared, run_dir: Path | None) -> tuple[RunDir, RunJob]:
    """Make the folder of a run and submit it. A job that is refused leaves no run behind, so that
    the same command can be given again. Raises ConfigError."""
    config = prepared.config
    check_new_run(config, prepared.model_folder, run_dir or Path(config.runs_dir) / config.name)
    was_there = run_dir is not None and run_dir.exists()
    run = create_run(prepared, run_dir)
    try:
        return run, submit_run(run, config)
    except ConfigError:
        made = [run.config, run.run_json, run.path / "tokenizer.json"]
        for path in made if was_there else []:
            path.unlink(missing_ok=True)
        if not was_there:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
