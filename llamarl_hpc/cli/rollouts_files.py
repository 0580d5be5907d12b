"""`llamarl-hpc rollouts export | repair RUN`: other files from the rollouts of a run."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamarl_hpc.cli.rollout_filters import (
    AllOption,
    MaxRewardOption,
    MinRewardOption,
    PromptOption,
    PurposeOption,
    StatusOption,
    reward_range,
)

if TYPE_CHECKING:
    from llamarl_hpc.run_dir import RunDir

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run (or the folder above).")]


def export_rollouts(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="parquet or jsonl.")],
    out: Annotated[Path, typer.Option("--out", help="File to write.")],
    text: Annotated[bool, typer.Option(help="Texts of prompt and completion, data row.")] = True,
    tokens: Annotated[bool, typer.Option(help="Token ids, log-probs and loss mask.")] = False,
    status: StatusOption = None,
    purpose: PurposeOption = None,
    prompt: PromptOption = None,
    min_reward: MinRewardOption = None,
    max_reward: MaxRewardOption = None,
    first_step: Annotated[int | None, typer.Option(help="From this optimizer step.")] = None,
    last_step: Annotated[int | None, typer.Option(help="Up to this optimizer step.")] = None,
    all_attempts: AllOption = False,
) -> None:
    """One row per completion as parquet or JSON Lines, for other tools."""
    from analysis.export import export
    from analysis.read_run import Run

    opened = Run.open(run)
    steps = None
    if first_step is not None or last_step is not None:
        steps = (first_step or 0, last_step if last_step is not None else 2**62)
    num = opened.without_damage(
        lambda run: export(
            run,
            out,
            to,
            text=text,
            tokens=tokens,
            lineage="all" if all_attempts else "current",
            purpose=purpose,
            status=status,
            steps=steps,
            prompt=prompt,
            reward=reward_range(min_reward, max_reward),
        )
    )
    for problem in opened.store.problems:
        typer.echo(problem, err=True)
    typer.echo(f"{num} rollouts of {opened.dir.path} -> {out}")


def repair(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", help="New run folder; default: RUN-repaired.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Though it may be running still, elsewhere.")
    ] = False,
) -> None:
    """Copy a run with what can be saved of its damaged rollout files. RUN itself is not changed."""
    from llamarl_hpc.errors import RunDirError
    from llamarl_hpc.run_dir import RunDir
    from llamarl_hpc.storage.rollout_store.repair import FileRepair
    from llamarl_hpc.storage.rollout_store.repair import repair as repair_store

    source = RunDir.open(run)
    target = RunDir(out or source.path.with_name(f"{source.path.name}-repaired"))
    if target.path.exists():
        raise RunDirError(f"{target.path} exists already; name a new folder with --out")

    def say(done: FileRepair) -> None:
        for problem in done.problems:
            typer.echo(problem)
        if done.problems:
            typer.echo(f"{done.name}: {done.kept} of {done.groups or 'unknown'} groups are saved")

    with _nobody_writes(source, force):
        try:
            done = repair_store(source.rollouts, target.rollouts, say=say)
            _copy_records(source, target)
        except BaseException as error:
            shutil.rmtree(target.path, ignore_errors=True)  # half a copy is none
            if isinstance(error, OSError):
                raise RunDirError(
                    f"cannot copy {source.path} to {target.path}: {error.strerror or error}; "
                    "choose another --out"
                ) from error
            raise
    damaged = sum(bool(entry.problems) for entry in done)
    typer.echo(f"{damaged} of {len(done)} files are damaged; repaired copy: {target.path}")


@contextmanager
def _nobody_writes(run: RunDir, force: bool) -> Iterator[None]:
    """Holds the controller's lock. Raises RunDirError while the run's controller lives."""
    from filelock import FileLock, Timeout

    from llamarl_hpc.errors import RunDirError

    last = (run.read_info().get("attempts") or [{}])[-1]
    who = f"its controller (pid {last.get('pid', '?')} on {last.get('host', '?')})"
    lock = FileLock(run.lock)
    can_tell = last.get("host") == socket.gethostname()
    if run.lock.exists():
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunDirError(
                f"{run.path} is in use by {who}; wait for it or stop it first"
            ) from error
        except OSError as error:  # of somebody else, or on a disk that is only read here
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            can_tell = False
    try:
        if last.get("outcome") == "running" and not can_tell and not force:
            raise RunDirError(
                f"{run.path} was left as running by {who}; if that is over, say so with --force"
            )
        yield
    finally:
        lock.release()


def _copy_records(source: RunDir, target: RunDir) -> None:
    """What reading a run needs besides rollouts; checkpoints stay where they are."""
    for path in (source.config, source.run_json, source.metrics, source.path / "tokenizer.json"):
        if path.is_file():
            shutil.copyfile(path, target.path / path.name)
    if source.trace.is_dir():
        shutil.copytree(source.trace, target.trace)
