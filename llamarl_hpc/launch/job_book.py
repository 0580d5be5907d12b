"""What is known of several jobs over time: the newest answers, and which jobs are lost.

Answers may be missing, late, or about a part of a job. Pure but for a warning: the clock is passed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection

from llamarl_hpc.launch.queue import JobView, Report

log = logging.getLogger(__name__)


class JobBook:
    """`note` what a question has brought; times are monotonic seconds."""

    def __init__(self) -> None:
        self._views: dict[str, JobView] = {}
        self._missing_since: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._lost: dict[str, str] = {}  # why
        self._complaint = ""

    def view(self, job: str) -> JobView:
        """What was last heard of it; empty when that is nothing."""
        return self._views.get(job, JobView())

    def why_lost(self, job: str) -> str:
        """Empty unless nothing more will be heard of the job."""
        return self._lost.get(job, "")

    def note(
        self,
        jobs: Collection[str],
        report: Report,
        *,
        now: float,
        missing_limit_s: float,
        silence_limit_s: float,
    ) -> None:
        """Slurm was asked about `jobs`. One that is in no queue any more, and whose end nobody
        knows, is lost after `missing_limit_s`; one of which nothing is heard because commands fail,
        after `silence_limit_s`. Complaints are told once."""
        complaint = "; ".join(report.failures)
        if complaint and complaint != self._complaint and not report.is_complete:
            log.warning("the states of jobs are not up to date: %s", complaint)
        self._complaint = complaint
        for job in jobs:
            seen = self._seen.setdefault(job, now)
            view = report.views.get(job)
            if view is not None:
                self._seen[job] = now
                self._views[job] = self._complete(job, view)
            if view is not None and (view.has_ended or job not in report.gone):
                self._missing_since.pop(job, None)
            elif job in report.gone:  # sacct may say for ever that it runs
                since = self._missing_since.setdefault(job, now)
                if now - since > missing_limit_s:
                    self._lost[job] = f"Slurm does not know job {job} any more. {complaint}".strip()
            elif now - seen > silence_limit_s:
                self._lost[job] = f"no word of job {job} for {now - seen:.0f} s: {complaint}"

    def _complete(self, job: str, view: JobView) -> JobView:
        """With the components that Slurm has forgotten sooner than the others, as they were."""
        old = self.view(job)
        return dataclasses.replace(
            view, states=old.states | view.states, nodes=old.nodes | view.nodes
        )
