"""Who starts the next attempt: the same job again, another one, or nobody; each asked once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import NoProgress, StoppedBySignal
from llamarl_hpc.launch.continuation import check_wanted, continue_run, started_by
from llamarl_hpc.launch.own_job import OwnJob
from llamarl_hpc.launch.queue import Answer
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

DISABLED = "Requested operation is presently disabled for job 700\n"


def record(component: int, state: str, restarts: int = 0) -> str:
    return (
        f"JobId={700 + component} HetJobId=700 HetJobOffset={component} JobName=a\n"
        f"   JobState={state} Reason=None\n   Requeue=1 Restarts={restarts}\n"
        "   StartTime=2026-12-01T03:37:52 EndTime=2026-12-01T03:42:52\n"
    )


def records(*states: str, restarts: int = 0) -> str:
    return "\n".join(record(k, state, restarts) for k, state in enumerate(states))


class FakeJob:
    """Slurm's side of job 700. `shows` are answers to "show job", the last one for ever."""

    def __init__(
        self, *shows: str, refusal: str = "", sbatch: tuple[int, str] = (0, "701")
    ) -> None:
        self.shows = list(shows) or [records("RUNNING", "RUNNING")]
        self.refusal, self.sbatch = refusal, sbatch
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> Answer:
        words = [word for word in argv if word not in ("env", "TZ=UTC0")]
        self.calls.append(words)
        if words[:3] == ["scontrol", "show", "job"]:
            text = self.shows.pop(0) if len(self.shows) > 1 else self.shows[0]
            return Answer(returncode=0 if text else 1, stdout=text, stderr="no answer")
        if words[:2] == ["scontrol", "requeue"]:
            return Answer(returncode=int(bool(self.refusal)), stdout="", stderr=self.refusal)
        if words[:2] == ["scontrol", "write"]:
            return Answer(returncode=0, stdout="#!/bin/bash\ntrue\n", stderr="")
        if words[:3] == ["scontrol", "show", "config"]:
            return Answer(returncode=0, stdout="KillWait                = 45 sec\n", stderr="")
        assert words[0] == "sbatch", words
        return Answer(returncode=self.sbatch[0], stdout=self.sbatch[1], stderr="not from here")

    def made(self, command: str) -> list[list[str]]:
        return [words for words in self.calls if command in words[:2]]


class Scene:
    def __init__(self, folder: Path) -> None:
        self.run = RunDir.create_at(folder / "run")
        self.saved: list[dict[str, Any]] = []
        write_json(self.run.run_json, {"attempts": []})

    def entry(self, **changes: Any) -> dict[str, Any]:
        entry = {
            "number": len(self.run.read_info()["attempts"]) + 1,
            "job_id": "700",
            "started_by": "",
            "resumed_from_step": 0,
            "outcome": "stopped",
            "reason": "stopped by the time limit after step 4 of 9, with a checkpoint",
            "stopped_by": "the time limit",
            "exit_code": 4,
            **changes,
        }
        self.save(self.run, {**entry, "outcome": "running"})
        self.saved.clear()
        return entry

    def save(self, run: RunDir, entry: dict[str, Any]) -> None:
        self.saved.append(dict(entry))
        info = run.read_info()
        others = [a for a in info["attempts"] if a["number"] != entry["number"]]
        write_json(run.run_json, {**info, "attempts": [*others, entry]})

    def checkpoint(self, step: int) -> None:
        (self.run.path / "latest.json").write_text(json.dumps({"step": step}))

    def go_on(self, slurm: FakeJob, entry: dict[str, Any], **launch: Any) -> str:
        config = Config.model_validate({"launch": launch})
        return continue_run(self.run, config, entry, OwnJob("700", run=slurm), self.save)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("llamarl_hpc.launch.own_job._PAUSE_S", 0.0)
    made = Scene(tmp_path)
    made.checkpoint(4)
    return made


def test_the_job_is_requeued_once_by_its_leader_after_that_is_written_down(scene: Scene) -> None:
    slurm, entry = FakeJob(), scene.entry()
    words = scene.go_on(slurm, entry)
    assert words == "job 700 goes back into the queue and continues the run"
    assert slurm.made("requeue") == [["scontrol", "requeue", "700"]]
    assert slurm.made("sbatch") == []
    assert scene.saved[0]["continued_by"] == entry["continued_by"] == "requeue"


def test_a_refused_requeue_becomes_one_dependent_job(scene: Scene) -> None:
    slurm, entry = FakeJob(refusal=DISABLED), scene.entry()
    assert scene.go_on(slurm, entry) == "job 701 continues the run once job 700 has ended"
    assert entry["continued_by"] == "resubmission:701"
    (call,) = slurm.made("sbatch")
    script = scene.run.path / "slurm" / "continue_1.sh"
    assert call[1:] == [
        "--parsable",
        "--dependency=afterany:700",
        str(script),
        str(scene.run.config),
        str(scene.run.path),
    ]
    assert script.read_text() == "#!/bin/bash\ntrue\n"
    assert scene.run.read_info()["jobs"][0]["id"] == "701"


def test_when_nothing_is_allowed_the_reasons_are_kept(scene: Scene) -> None:
    slurm, entry = FakeJob(refusal=DISABLED, sbatch=(1, "")), scene.entry()
    assert scene.go_on(slurm, entry) == ""
    assert "presently disabled" in entry["not_continued"]
    assert "sbatch refused the job (exit code 1): not from here" in entry["not_continued"]
    assert entry["continued_by"] == ""


@pytest.mark.parametrize(
    ("launch", "requeued", "submitted"),
    [("requeue", 1, 0), ("resubmit", 0, 1), ("never", 0, 0)],
)
def test_the_config_says_how(scene: Scene, launch: str, requeued: int, submitted: int) -> None:
    slurm = FakeJob(refusal=DISABLED)
    scene.go_on(slurm, scene.entry(), requeue=launch)
    assert (len(slurm.made("requeue")), len(slurm.made("sbatch"))) == (requeued, submitted)


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_code": 0, "outcome": "done", "stopped_by": ""},
        {"exit_code": 2, "outcome": "failed", "stopped_by": ""},
        {"stopped_by": "SIGINT"},
        {"stopped_by": "a stop request"},
        {"stopped_by": "an alarm", "exit_code": 3, "outcome": "failed"},
        {"stopped_by": "cancellation of component 1 (generator)"},
    ],
)
def test_what_somebody_wanted_or_must_mend_is_not_continued(
    scene: Scene, changes: dict[str, Any]
) -> None:
    slurm, entry = FakeJob(), scene.entry(**changes)
    assert scene.go_on(slurm, entry) == ""
    assert slurm.calls == [] and entry["not_continued"]


def test_a_cancelled_run_or_job_is_not_continued(scene: Scene) -> None:
    slurm, entry = FakeJob(records("COMPLETING", "COMPLETING")), scene.entry(stopped_by="SIGTERM")
    assert scene.go_on(slurm, entry) == ""
    assert entry["not_continued"] == "job 700 was cancelled"
    scene.run.stop_requested.touch()
    assert scene.go_on(FakeJob(), entry) == "" and entry["not_continued"] == "it was cancelled"


def test_an_executor_that_failed_is_continued(scene: Scene) -> None:
    entry = scene.entry(exit_code=3, outcome="failed", stopped_by="")
    assert "goes back" in scene.go_on(FakeJob(), entry)


def test_a_job_that_is_requeued_in_part_is_asked_for_until_all_of_it_waits(scene: Scene) -> None:
    half = "\n".join(
        [record(0, "COMPLETING", 1), record(1, "PENDING", 1), record(2, "COMPLETED", 0)]
    )
    slurm = FakeJob(
        half, half, half, records("PENDING", "PENDING", "PENDING", restarts=1),
        refusal="Job is pending execution for job 700\n",
    )  # fmt: skip
    entry = scene.entry(stopped_by="SIGTERM")
    assert "goes back into the queue" in scene.go_on(slurm, entry)
    assert len(slurm.made("requeue")) == 3 and slurm.made("sbatch") == []


def test_a_crash_loop_ends_with_what_ended_the_attempts(scene: Scene) -> None:
    failed = {"exit_code": 3, "outcome": "failed", "stopped_by": "", "reason": "trainer died\nlog"}
    scene.checkpoint(0)
    for by in ("", "requeue"):
        entry = scene.entry(**failed, started_by=by)
        assert scene.go_on(FakeJob(), entry)
        scene.save(scene.run, entry)
    entry = scene.entry(**failed, started_by="requeue")
    slurm = FakeJob()
    with pytest.raises(NoProgress, match=r"3 attempts in a row .* attempt 3: trainer died$"):
        scene.go_on(slurm, entry)
    assert (entry["outcome"], entry["exit_code"], slurm.made("requeue")) == ("failed", 3, [])
    assert "made no progress" in entry["not_continued"]


# ------------------------------------------------------------------ the next attempt


def test_a_job_knows_whether_it_continues_the_run(scene: Scene) -> None:
    scene.save(scene.run, scene.entry() | {"continued_by": "resubmission:701"})
    assert started_by(scene.run, OwnJob("701")) == "resubmission"
    assert started_by(scene.run, OwnJob("701", restarts=1)) == "resubmission"
    assert started_by(scene.run, OwnJob("700", restarts=1)) == "requeue"
    assert started_by(scene.run, OwnJob("700")) == ""  # the folder was submitted by hand
    assert started_by(scene.run, None) == ""


def test_a_cancelled_run_is_taken_up_again_by_a_person_only(scene: Scene) -> None:
    scene.run.stop_requested.touch()
    with pytest.raises(StoppedBySignal, match="was cancelled"):
        check_wanted(scene.run, Config(), "requeue")
    check_wanted(scene.run, Config(), "")
    assert not scene.run.stop_requested.exists()


def test_a_controller_that_is_killed_again_and_again_is_not_started_for_ever(scene: Scene) -> None:
    for by in ("", "requeue", "requeue"):
        scene.save(scene.run, scene.entry(started_by=by, resumed_from_step=4, outcome="running"))
    check_wanted(scene.run, Config(), "")
    with pytest.raises(NoProgress, match="3 attempts in a row"):
        check_wanted(scene.run, Config(), "requeue")


def test_killwait_is_asked_for_and_silence_changes_nothing() -> None:
    assert OwnJob("700", run=FakeJob()).kill_wait_s() == 45.0
    assert OwnJob("700", run=FakeJob("")).look() is None


def test_restarts_before_this_start_are_none_of_ours() -> None:
    slurm = FakeJob(records("RUNNING", restarts=2), records("COMPLETING", restarts=3))
    job = OwnJob("700", restarts=2, run=slurm)
    seen = [job.look(), job.look()]
    assert [now.ending if now else None for now in seen] == ["", "requeue"]
