"""The one module that knows where things lie in a run folder.

    runs/<name>/<run id>/
      config.yaml  run.json  keys/                     what runs, and who may talk to it
      attempts/<n>/<executor>.<rank>.log  steps.json   one folder per start; latest -> attempts/<n>
      rollouts/segment_000000.h5 ...                   append-only (storage/rollout_store.py)
      metrics.jsonl  tensorboard/  trace/              one JSON object per step; spans per executor
      checkpoints/step_000100/{zero/,state.json,COMPLETE}  latest.json
      reference/step_000100/                           model folders, with reference.update_steps
      report.html  export/

Nothing here imports more than the standard library, and PyYAML when a configuration is read:
`status` on a login node reads run folders.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import RunDirError

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+-]+")


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Properties only name; `create` and `next_attempt` make folders."""

    path: Path

    # ------------------------------------------------------------------ making and finding

    @classmethod
    def create(cls, root: Path | str, name: str) -> RunDir:
        """A new folder `root/name/<time>-<random>`; the id never depends on the name alone."""
        run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
        return cls.create_at(
            Path(root) / (_UNSAFE.sub("-", name).strip("-")[:64] or "run") / run_id
        )

    @classmethod
    def create_at(cls, path: Path | str) -> RunDir:
        """A new run in exactly this folder, which must not hold one yet, nor anything else but
        what a start that was cut short, or a batch script's log, may have left."""
        run = cls(Path(path).resolve())
        if run.config.exists():
            raise RunDirError(
                f"{run.path} already holds a run; continue it with 'llamarl-hpc resume "
                f"{run.path}' or choose another --run-dir"
            )
        if strangers := run._strangers():
            raise RunDirError(
                f"{run.path} holds other things ({', '.join(strangers[:3])}); give a new or empty "
                "folder as --run-dir"
            )
        try:
            for folder in (run.path, run.attempts, run.rollouts, run.trace, run.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            run.keys.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"cannot create the run folder {run.path}: {error}") from error
        return run

    def _strangers(self) -> list[str]:
        if not self.path.is_dir():
            return []
        ours = {"attempts", "rollouts", "trace", "checkpoints", "keys", "slurm", self.lock.name}
        return sorted(
            p.name
            for p in self.path.iterdir()
            if p.name not in ours and p.suffix not in {".out", ".err", ".log"}
        )

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """An existing run, or `RunDirError`. A parent folder stands for its newest run."""
        run = cls(Path(path).resolve())
        if run.config.is_file():
            return run
        if run.path.is_dir():
            inner = [p.parent for p in run.path.glob("*/config.yaml")]
            inner += [p.parent for p in run.path.glob("*/*/config.yaml")]
            if inner:
                return cls(max(inner, key=lambda p: (p / "config.yaml").stat().st_mtime))
        raise RunDirError(
            f"{path} is not a run folder (no config.yaml in it); give the folder that "
            "'llamarl-hpc run' printed"
        )

    # ------------------------------------------------------------------ fixed places

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def address(self) -> Path:
        """Where the controller of the running attempt listens (JSON)."""
        return self.keys / "controller.json"

    @property
    def lock(self) -> Path:
        """Held by the controller while the run is on; one controller per run."""
        return self.path / "controller.lock"

    @property
    def stop_requested(self) -> Path:
        """A file that is there once somebody has cancelled the run: no attempt may then continue
        it by itself. A resume removes it."""
        return self.path / "stop"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Manifest of the shared-memory weight transport, if it is used."""
        return self.path / "weights"

    @property
    def reference(self) -> Path:
        """Model folders of references that were once the policy (`reference.update_steps`)."""
        return self.path / "reference"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def background(self) -> Path:
        """Which process a notebook started to make the next attempt (JSON)."""
        return self.path / "background.json"

    @property
    def background_log(self) -> Path:
        """What that process printed."""
        return self.path / "background.log"

    # ------------------------------------------------------------------ per attempt

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number}"

    def log(self, attempt: int, executor: str, rank: int) -> Path:
        return self.attempt(attempt) / f"{executor}.{rank}.log"

    def trace_file(self, attempt: int, executor: str) -> Path:
        return self.trace / f"{executor}.{attempt}.jsonl"

    def last_attempt(self) -> int:
        """Number of the newest attempt; 0 when the run was never started. The first is 1."""
        numbers = [int(p.name) for p in self.attempts.glob("*") if p.name.isdigit()]
        return max(numbers, default=0)

    def next_attempt(self) -> int:
        """Make the folder of the next attempt and point `latest` at it."""
        number = self.last_attempt() + 1
        self.attempt(number).mkdir(parents=True)
        link = self.path / "latest"
        beside = self.path / f".latest.{os.getpid()}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(Path("attempts") / f"{number}")
        os.replace(beside, link)
        return number

    # ------------------------------------------------------------------ run.json

    def read_info(self) -> dict[str, Any]:
        """What `run.json` says; empty when it is not there yet. Raises RunDirError when it is
        damaged."""
        try:
            info = json.loads(self.run_json.read_text())
            _check_info(info)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RunDirError(
                f"{self.run_json} is damaged ({error}); mend it, or move it away to go on without "
                "what it says of earlier attempts"
            ) from error
        return dict(info)

    def read_config(self) -> dict[str, Any]:
        """What `config.yaml` says, as plain values and unchecked; whoever runs it loads it as a
        `Config`. Raises RunDirError when it is missing or no configuration."""
        import yaml

        try:
            values = yaml.safe_load(self.config.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())
            raise RunDirError(f"{self.config} cannot be read ({why}); mend it") from error
        blocks = dict(values) if isinstance(values, dict) else {"it": values}
        for name, value in blocks.items():
            if not (value is None or isinstance(value, dict) or name in _NOT_BLOCKS):
                raise RunDirError(f"{self.config} is damaged ({name} is {value!r}); mend it")
        return blocks


_NOT_BLOCKS = {"name", "runs_dir", "rewards"}
_ATTEMPT = {"number": int, "resumed_from_step": int, "max_staleness": int, "outcome": str}
_ATTEMPT |= {"started": float, "ended": float, "reason": str, "host": str, "job_id": str}
_JOB = {"id": str, "submitted": float, "cluster": str}
_RUN = {"created": float, "versions": dict, "attempts": list, "jobs": list}


def _check_info(info: object) -> None:
    """Raises ValueError for what a run never writes into run.json."""
    _check_types("it", info, _RUN)
    assert isinstance(info, dict)
    for name, types, key in (("attempts", _ATTEMPT, "number"), ("jobs", _JOB, "id")):
        for index, entry in enumerate(info.get(name) or []):
            _check_types(f"{name}.{index}", entry, types)
            if key not in entry:
                raise ValueError(f"{name}.{index} has no {key}")


def _check_types(name: str, entry: object, types: dict[str, type]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is {entry!r}")
    for key, wanted in types.items():
        value = entry.get(key)
        fits = isinstance(value, int) if wanted is float else False
        if value is not None and not fits and not isinstance(value, wanted):
            raise ValueError(f"{name}.{key} is {value!r}")
