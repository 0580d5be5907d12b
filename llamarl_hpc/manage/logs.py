"""What executors and controller wrote, while they write it.

The controller's files are what the batch script printed and its own log; an executor has one file
a rank, and what its launcher (mpiexec, srun) said where the rank wrote nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.manage.jobs import newest_job
from llamarl_hpc.run_dir import RunDir

_POLL_S = 0.3
_SUMMARY_S = 1.0  # after the end of a run: it may still print how it was
_ASK_S = 20.0  # between questions whether a run that is silent goes on
_BLOCK = 1 << 16
_LOG = re.compile(r"(?P<executor>.+)\.(?P<rank>\d+|launch)\.log")


@dataclass(kw_only=True)
class _File:
    """One file, and how far it was read."""

    path: Path
    name: str
    position: int = 0
    rest: bytes = field(default=b"", repr=False)

    def tail(self, lines: int, *, torn: bool) -> list[str]:
        """The last lines, with one that has no end yet if `torn`; reading goes on behind them."""
        with self.path.open("rb") as file:
            end = start = file.seek(0, 2)
            data = b""
            while start and data.count(b"\n") <= lines:
                size = min(_BLOCK, start)
                start -= size
                file.seek(start)
                data = file.read(size) + data
        whole, _, self.rest = data.rpartition(b"\n")
        self.position = end
        found = whole.split(b"\n") if b"\n" in data else []
        found += [self.rest] if torn and self.rest else []
        return [line.decode(errors="replace") for line in found[len(found) - lines :]]

    def new(self) -> list[str]:
        """Whole lines that came since."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read()
        except OSError:
            return []
        self.position += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def follow_logs(
    run: RunDir,
    executor: str | None = None,
    attempt: int | None = None,
    *,
    rank: int | None = None,
    lines: int = 20,
    follow: bool = True,
) -> Iterator[str]:
    """The last lines of the files, then, with `follow`, new ones until the run has ended.

    `executor`: None for the controller, `generator.1`, or a role (`generator`: all replicas).
    `attempt`: None for the newest, and those that come after it. Where there are several files,
    each line begins with its file's name. Raises ConfigError when there is no such log.
    """
    _check(run, executor, attempt, rank, wait=follow)
    return _lines(run, executor, attempt, rank, lines, follow)


def _lines(
    run: RunDir,
    executor: str | None,
    attempt: int | None,
    rank: int | None,
    lines: int,
    follow: bool,
) -> Iterator[str]:
    files: dict[Path, _File] = {}
    asked, is_first, is_last = time.monotonic(), True, not follow
    while True:
        heard = False
        chosen = _files(run, executor, attempt, rank)
        for file in chosen:
            known = files.setdefault(file.path, file)
            found = known.tail(lines, torn=not follow) if is_first else known.new()
            heard = heard or bool(found)
            yield from (f"{known.name} | {line}" if len(chosen) > 1 else line for line in found)
        if is_last:
            return
        is_first = False
        waited = time.monotonic() - asked > _ASK_S
        is_last = not heard and _has_ended(run, attempt, ask=waited)
        if heard or waited:
            asked = time.monotonic()
        time.sleep(_SUMMARY_S if is_last else _POLL_S)


def _has_ended(run: RunDir, attempt: int | None, *, ask: bool) -> bool:
    """Whether nothing more will come: the run folder says so, or (`ask`) Slurm."""
    attempts = run.read_info().get("attempts", [])
    if attempt is not None and attempt < len(attempts):
        return True
    last = attempts[-1] if attempts else {}
    if last.get("outcome") in ("done", "failed", "stopped") and not last.get("continued_by"):
        job = newest_job(run)
        return job is None or job.job_id == last.get("job_id") or (ask and _is_over(run))
    return ask and _is_over(run)


def _is_over(run: RunDir) -> bool:
    from llamarl_hpc.manage.status import read_status

    return read_status(run)["state"] not in ("queued", "starting", "running")


# ------------------------------------------------------------------ which files


def _files(run: RunDir, executor: str | None, attempt: int | None, rank: int | None) -> list[_File]:
    number = run.last_attempt() if attempt is None else attempt
    if executor in (None, "controller"):
        paths = [*_of_the_job(run, number), run.log(number, "controller", 0)]
        names = {".out": "stdout", ".err": "stderr", ".log": "controller"}
        return [_File(path=p, name=names[p.suffix]) for p in paths if p.exists()]
    assert executor is not None
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(run.attempt(number).glob("*.log")):
        match = _LOG.fullmatch(path.name)
        if match and f"{match['executor']}.".startswith(f"{executor}."):
            found[match["executor"], match["rank"]] = path
    chosen = {
        key: path
        for key, path in found.items()
        if (key[1] == f"{rank}" if rank is not None else _is_shown(key, found))
    }
    return [_File(path=path, name=f"{key[0]}.{key[1]}") for key, path in chosen.items()]


def _is_shown(key: tuple[str, str], found: dict[tuple[str, str], Path]) -> bool:
    """Ranks; of launchers what they say where rank 0 has said nothing."""
    if key[1] != "launch":
        return True
    first = found.get((key[0], "0"))
    return (first is None or not first.stat().st_size) and bool(found[key].stat().st_size)


def _of_the_job(run: RunDir, number: int) -> list[Path]:
    """What the batch script of an attempt's job printed; before the first attempt, the newest's."""
    entries = {a["number"]: a for a in run.read_info().get("attempts", [])}
    job = newest_job(run)
    name = entries[number].get("job_id") if number in entries else job.job_id if job else None
    return [run.path / "slurm" / f"{name}_0_log.{kind}" for kind in ("out", "err") if name]


def _check(
    run: RunDir, executor: str | None, attempt: int | None, rank: int | None, *, wait: bool
) -> None:
    last = run.last_attempt()
    if attempt is not None and not 1 <= attempt <= last:
        raise ConfigError(f"there is no attempt {attempt}: the run has made {last}")
    if _files(run, executor, attempt, rank) or (wait and not last):
        return
    if not last:
        raise ConfigError("nothing was written yet: the run has not started")
    folder = run.attempt(last if attempt is None else attempt)
    raise ConfigError(
        f"attempt {folder.name} has no log of {_named(executor, rank)}; {_known(folder, executor)}"
    )


def _named(executor: str | None, rank: int | None) -> str:
    return f"{executor or 'controller'}" + (f" rank {rank}" if rank is not None else "")


def _known(folder: Path, executor: str | None) -> str:
    """Which logs there are: the ranks of the executor, or the executors where it is none."""
    logs = [m for path in folder.glob("*.log") if (m := _LOG.fullmatch(path.name))]
    own = [m for m in logs if f"{m['executor']}.".startswith(f"{executor}.")]
    ranks = sorted({int(m["rank"]) for m in own if m["rank"].isdigit()})
    if ranks:
        return f"it has rank {', '.join(map(str, ranks))}"
    return f"there are {', '.join(sorted({m['executor'] for m in logs}))}"
