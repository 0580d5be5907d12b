"""Submit a Python function, or a command, as one heterogeneous Slurm job through submitit.

The batch script has one block of options per component and *becomes* the function: no outer srun,
so Slurm's signal before the time limit reaches it, and it may start job steps on every component
(`srun --het-group=k`). Usable for any heterogeneous job (docs/slurm.md has an example). The only
door to submitit.

    executor = HetSlurmExecutor("logs", [Component(name="gpu", options={"partition": "a100"}), ...])
    job = executor.submit(function, argument)     # a submitit.Job
    job.state, job.component_states, job.result(), job.stdout(), job.cancel()

submitit itself cannot: it writes one block, looks for job `700` in a table that says `700+0`, and
needs accounting to notice an end. What is inherited: pickles, names of files, results, waiting.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import submitit
from submitit.core import core, utils
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.launch import queue
from llamarl_hpc.launch.job_book import JobBook
from llamarl_hpc.launch.script import BatchScript, Component, Options, log_file, render
from llamarl_hpc.launch.sent_function import warn_of_a_start_from_zero, write_function
from llamarl_hpc.slurm_text.option_names import check_option
from llamarl_hpc.slurm_text.sbatch_answer import Submitted, parse_submission
from llamarl_hpc.slurm_text.time_limit import format_time, parse_time

R = TypeVar("R", covariant=True)
log = logging.getLogger(__name__)

LOST = "LOST"  # squeue answers and does not know the job, nor does sacct
_MARGIN_S = 86_400.0  # sacct is asked for jobs from a day before the submission on
# options that Slurm heeds in the first component only
_OF_THE_JOB = {"job-name", "comment", "dependency", "mail-type", "mail-user", "wckey", "begin"}
_NO_LIMIT_MIN = 60 * 24 * 365


class SubmissionError(ConfigError, utils.FailedSubmissionError):  # type: ignore[misc]
    """sbatch refused the job, or its answer holds no id."""


# ------------------------------------------------------------------ watching


class HetSlurmInfoWatcher(SlurmInfoWatcher):  # type: ignore[misc]
    """States of all jobs of this process, with one question for all of them.

    A job that no command knows any more counts as ended after `missing_limit_s`; while commands
    fail states stay as they were, for `silence_limit_s` at most.
    """

    missing_limit_s = 120.0
    silence_limit_s = 3600.0

    def __init__(self, delay_s: int = 60, run: queue.Run = queue.run_command) -> None:
        super().__init__(delay_s)
        self._run = run
        self._book = JobBook()
        self._clusters: dict[str, str] = {}
        self._submitted: dict[str, float] = {}  # time of the epoch

    def introduce(self, job_id: str, *, cluster: str, submitted: float) -> None:
        """Where and when the job was submitted."""
        self._clusters[job_id] = cluster
        self._submitted[job_id] = submitted

    def view(self, job_id: str) -> queue.JobView:
        """What was last heard of the job."""
        return self._book.view(job_id)

    @property
    def age_s(self) -> float:
        """Seconds since Slurm was asked."""
        return time.time() - float(self._last_status_check)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        self.get_info(job_id, mode=mode)
        return LOST if self.why_lost(job_id) else self.view(job_id).state

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether all components have ended, or the job is lost."""
        self.get_info(job_id, mode=mode)
        return bool(self.why_lost(job_id)) or self.view(job_id).has_ended

    def why_lost(self, job_id: str) -> str:
        """Empty unless the state is LOST."""
        return self._book.why_lost(job_id)

    def watch_again(self, job_id: str) -> None:
        """Ask about the job soon and often, also when it seemed to have ended."""
        self._finished.discard(job_id)
        self.register_job(job_id)

    def update_if_long_enough(self, mode: str) -> None:
        """A question that is forced is asked; submitit's own leaves it out within a millisecond of
        the last, and answers with what was true before."""
        if mode == "force":
            self.update()
        else:
            super().update_if_long_enough(mode)

    def update(self) -> None:
        waiting = self._registered - self._finished
        for cluster in {self._clusters.get(job, "") for job in waiting}:
            jobs = {job for job in waiting if self._clusters.get(job, "") == cluster}
            since = min(self._submitted.get(job, time.time()) for job in jobs) - _MARGIN_S
            self._num_calls += 1
            report = queue.ask(jobs, since=since, cluster=cluster, run=self._run)
            self._book.note(
                jobs,
                report,
                now=time.monotonic(),
                missing_limit_s=self.missing_limit_s,
                silence_limit_s=self.silence_limit_s,
            )
            self._info_dict |= {job: _info(job, self.view(job)) for job in report.views}
        self._last_status_check = time.time()
        self._finished |= {job for job in waiting if self.is_done(job, mode="cache")}


def _info(job: str, view: queue.JobView) -> dict[str, str]:
    nodes = [view.nodes[k] for k in sorted(view.nodes) if view.nodes[k]]
    info = {"JobID": job, "State": view.state, "NodeList": ",".join(nodes)}
    return info | ({"Reason": view.reason} if view.reason else {})


# ------------------------------------------------------------------ jobs


class HetSlurmJob(SlurmJob[R]):  # type: ignore[misc]
    """A heterogeneous job; `job_id` is the leader's, which stands for all components."""

    watcher = HetSlurmInfoWatcher(delay_s=30)
    cluster = ""
    component_names: tuple[str, ...] = ()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self.placed(cluster="", component_names=())

    def placed(self, *, cluster: str, component_names: Sequence[str]) -> None:
        """On which cluster (empty: the default one), and what its components are called."""
        self.cluster, self.component_names = cluster, tuple(component_names)
        self.watcher.introduce(self.job_id, cluster=cluster, submitted=self._submission_time())

    def wait_for_slurm(self, timeout_s: float = 60.0) -> None:
        """After the result is there: wait until Slurm, too, says that the job has ended."""
        deadline = time.monotonic() + timeout_s
        while not self.watcher.is_done(self.job_id, mode="force"):
            if time.monotonic() > deadline:
                log.warning("job %s is still %s after its end", self.job_id, self.state)
                return
            time.sleep(2.0)

    def _submission_time(self) -> float:
        try:
            return float(self.paths.submission_file.stat().st_mtime)
        except OSError:
            return time.time()

    @property
    def state(self) -> str:
        """Of the whole job: the worst end of a component if there is one."""
        self._refresh()
        return self.watcher.get_state(self.job_id, mode="cache")

    def _refresh(self) -> None:
        """Ask Slurm now and then; sooner when a result says that the job must have ended."""
        watcher = self.watcher
        early = self._has_result() and not watcher.view(self.job_id).has_ended
        watcher.get_info(self.job_id, mode="force" if early and watcher.age_s > 1.0 else "standard")

    def _has_result(self) -> bool:
        return bool(self.paths.result_pickle.exists())

    @property
    def component_states(self) -> dict[str, str]:
        """State of each component by its name, or number where names are not known."""
        self._refresh()
        states = self.watcher.view(self.job_id).states
        names = dict(enumerate(self.component_names))
        return {names.get(k, f"{k}"): states[k] for k in sorted(states)}

    @property
    def _results_timeout_s(self) -> float:
        """A shared file system may show a result late; a job that failed left none."""
        return 60.0 if self.state == "COMPLETED" else 3.0

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        try:
            outcome, result = super()._get_outcome_and_result()
        except utils.UncompletedJobError as error:
            if why := self.watcher.why_lost(self.job_id):
                raise utils.UncompletedJobError(f"{why}\n{error}") from error
            raise
        return outcome, result

    def cancel(self, check: bool = True) -> None:
        """End all components. With `check`, raises SubmissionError when scancel refuses."""
        where = [f"--clusters={self.cluster}"] if self.cluster else []
        answer = queue.run_command([self._cancel_command, *where, self.job_id])
        if check and answer.returncode:
            raise SubmissionError(f"scancel failed: {' '.join(answer.stderr.split())}")
        self.watcher.watch_again(self.job_id)  # the end is near


# ------------------------------------------------------------------ submitting


def het_script(
    folder: str,
    components: Sequence[Component],
    command: str,
    *,
    job: Options | None = None,
    signal_delay_s: int = 180,
    requeue: bool = False,
    **parts: Any,
) -> BatchScript:
    """A script that becomes `command`, with its log where submitit looks for it. `job`: options of
    the whole job; `parts`: comment, setup, environment of the script."""
    options: dict[str, str | int | None] = {
        "job-name": "submitit",
        "output": log_file(f"{folder}/%j_0_log.out"),
        "error": log_file(f"{folder}/%j_0_log.err"),
        "open-mode": "append",
        "signal": f"B:USR2@{signal_delay_s}",
        "requeue" if requeue else "no-requeue": None,
    }
    return BatchScript(
        job=options | dict(job or {}), components=components, command=command, **parts
    )


class HetSlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """A submitit executor whose jobs have several components.

    `update_parameters` takes sbatch's long options (`None` and `False`: not set; `True`: an option
    without a value): those of the job, and what every component gets unless it says otherwise.
    `requeue` lets Slurm, and submitit's checkpointing, start the job again.
    """

    job_class: type[HetSlurmJob[Any]] = HetSlurmJob

    def __init__(
        self,
        folder: Path | str,
        components: Sequence[Component],
        *,
        job: Options | None = None,
        signal_delay_s: int = 180,
        requeue: bool = False,
        setup: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        comment: Sequence[str] = (),
        max_num_timeout: int = 3,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout, python=python)
        if not components:
            raise ConfigError("a heterogeneous job needs at least one component")
        self.components = [Component(name=c.name, options=_checked(c.options)) for c in components]
        self.job_options = _checked(job or {})
        self.signal_delay_s, self.requeue = signal_delay_s, requeue
        self.setup, self.environment = list(setup), dict(environment or {})
        self.comment = list(comment)

    @classmethod
    def affinity(cls) -> int:
        """Below SlurmExecutor's, so that submitit never chooses this one by itself."""
        return min(1, int(super().affinity()))

    def submit_command(self, argv: Sequence[str]) -> HetSlurmJob[Any]:
        """A job whose batch script becomes this command. It leaves no result of submitit's."""
        self._root().mkdir(parents=True, exist_ok=True)
        return self._submit_command(shlex.join(argv))

    def script(self, command: str) -> str:
        """The batch script that would be submitted for this command (shell text)."""
        components = [
            Component(name=c.name, options={**self.parameters, **c.options})
            for c in self.components
        ]
        return render(
            het_script(
                str(self.folder),
                components,
                command,
                job=self.job_options,
                signal_delay_s=self.signal_delay_s,
                requeue=self.requeue,
                setup=self.setup,
                environment=self.environment,
                comment=self.comment,
            )
        )

    # ------------------------------------------------------------------ what submitit calls

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        given = {k: v for k, v in kwargs.items() if v is not None and v is not False}
        options = _checked({k: None if v is True else v for k, v in given.items()})
        for name, value in options.items():
            place = self.job_options if name in _OF_THE_JOB else self.parameters
            place[name] = value

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        if len(delayed_submissions) != 1:
            raise ConfigError(
                f"{len(delayed_submissions)} functions would be a job array, which a heterogeneous "
                "job cannot be; submit them one by one"
            )
        (delayed,) = delayed_submissions
        root = self._root()
        root.mkdir(parents=True, exist_ok=True)
        pickle = root / f"{uuid.uuid4().hex}.pkl"
        delayed.set_timeout(self._timeout_min(), self.max_num_timeout)
        if self.requeue:
            warn_of_a_start_from_zero(delayed.function)
        write_function(
            delayed.function,
            delayed.args,
            delayed.kwargs,
            write=lambda: delayed.dump(pickle),
            can_be_sent=_can_be_sent,
            path=pickle,
        )
        command = " ".join(
            ["env", "SUBMITIT_EXECUTOR=slurm", self._submitit_command_str]  # whose batch step it is
        )
        job = self._submit_command(command)
        job.paths.move_temporary_file(pickle, "submitted_pickle")
        return [job]

    def _submit_command(self, command: str) -> HetSlurmJob[Any]:
        uid = uuid.uuid4().hex
        path = self._root() / f".submission_file_{uid}.sh"
        path.write_text(self.script(command))
        submitted = _sbatch(path)
        job = self.job_class(self.folder, submitted.job)
        job.paths.move_temporary_file(path, "submission_file", keep_as_symlink=True)
        job.placed(cluster=submitted.cluster, component_names=[c.name for c in self.components])
        return job

    def _root(self) -> Path:
        return Path(utils.JobPaths.get_first_id_independent_folder(self.folder))

    def _timeout_min(self) -> int:
        times = [c.options.get("time", self.parameters.get("time")) for c in self.components]
        limits = [parse_time(str(text)) for text in times if text is not None]
        return max((limit // 60 for limit in limits if limit), default=_NO_LIMIT_MIN)


def _can_be_sent(value: Any) -> bool:
    try:
        utils.cloudpickle_dump(value, Path(os.devnull))
    except Exception:  # whatever an object's own pickling raises
        return False
    return True


def _checked(options: Options) -> dict[str, str | int | None]:
    """Options by sbatch's spelling, the time limit (minutes, or Slurm's forms) in one form.

    Raises ConfigError for what sbatch does not know.
    """
    checked: dict[str, str | int | None] = {}
    for key, value in options.items():
        name = check_option(key)
        if name == "time" and value is not None:
            seconds = parse_time(str(value))
            if seconds is None:
                continue
            value = format_time(seconds)
        checked[name] = value
    return checked


def _sbatch(path: Path) -> Submitted:
    answer = queue.run_command(["sbatch", "--parsable", str(path)])
    try:
        return parse_submission(answer.stdout, answer.stderr, answer.returncode)
    except ConfigError as error:
        raise SubmissionError(str(error)) from None
