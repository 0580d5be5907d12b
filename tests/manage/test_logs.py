"""Which logs are shown, how their ends are read, and when following them ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from run_folders import MakeRun

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.manage import logs
from llamarl_hpc.manage.logs import follow_logs
from llamarl_hpc.run_dir import RunDir


@pytest.fixture
def run(make_run: MakeRun) -> RunDir:
    made = make_run(attempts=[{"outcome": "failed"}, {"outcome": "done", "job_id": "700"}])
    write(made, 1, "controller.0.log", "first attempt\n")
    write(made, 2, "controller.0.log", "one\ntwo\nthree\n")
    write(made, 2, "trainer.0.log", "rank zero\n")
    write(made, 2, "trainer.1.log", "rank one\n")
    write(made, 2, "trainer.launch.log", "not of interest\n")
    write(made, 2, "generator.0.0.log", "g0\n")
    write(made, 2, "generator.1.0.log", "")
    write(made, 2, "generator.1.launch.log", "srun: error: no such partition\n")
    return made


def write(run: RunDir, attempt: int, name: str, text: str) -> Path:
    path = run.attempt(attempt) / name
    path.write_text(text)
    return path


def shown(run: RunDir, executor: str | None = None, **options: int | None) -> list[str]:
    return list(follow_logs(run, executor, follow=False, **options))  # type: ignore[arg-type]


def test_the_controllers_log_is_the_default(run: RunDir) -> None:
    assert shown(run) == shown(run, "controller") == ["one", "two", "three"]
    assert shown(run, lines=2) == ["two", "three"] and shown(run, lines=0) == []
    assert shown(run, attempt=1) == ["first attempt"]


def test_what_the_batch_script_printed_belongs_to_the_controller(run: RunDir) -> None:
    (run.path / "slurm" / "700_0_log.out").write_text("step 0\n")
    (run.path / "slurm" / "700_0_log.err").write_text("")
    assert shown(run, lines=1) == ["stdout | step 0", "controller | three"]


def test_executors_are_shown_by_name_role_and_rank(run: RunDir) -> None:
    assert shown(run, "trainer") == ["trainer.0 | rank zero", "trainer.1 | rank one"]
    assert shown(run, "trainer", rank=1) == ["rank one"]
    assert shown(run, "generator.0") == ["g0"]
    several = ["generator.0.0 | g0", "generator.1.launch | srun: error: no such partition"]
    assert shown(run, "generator") == several  # the launcher's where the rank has said nothing


@pytest.mark.parametrize(
    ("executor", "options", "message"),
    [
        ("critic", {}, "no log of critic; there are controller, generator.0, generator.1, trainer"),
        ("trainer", {"rank": 7}, r"no log of trainer rank 7; it has rank 0"),
        (None, {"attempt": 3}, "there is no attempt 3: the run has made 2"),
        (None, {"attempt": 0}, "there is no attempt 0"),
    ],
)
def test_a_log_that_is_not_there_is_one_sentence(
    run: RunDir, executor: str | None, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shown(run, executor, **options)


def test_a_run_that_has_not_started_has_written_nothing(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="the run has not started"):
        shown(make_run(name="new"))


def test_long_files_and_torn_ends_are_read_from_the_end(run: RunDir) -> None:
    lines = [f"line {k} {'x' * 100} \u00e9" for k in range(3000)]
    write(run, 2, "reward.0.log", "\n".join(lines))  # the last has no end
    assert shown(run, "reward", lines=2000) == lines[-2000:]
    assert shown(run, "reward", lines=1) == lines[-1:]
    write(run, 2, "reward.0.log", "\n\nx\n")
    assert shown(run, "reward") == ["", "", "x"]


def test_following_goes_over_to_the_next_attempt_and_ends_with_the_run(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(attempts=[{"job_id": "700"}], jobs=["700"])
    file = write(run, 1, "controller.0.log", "one\ntor")
    events = iter(
        [
            lambda: file.open("a").write("n\n"),
            lambda: note(run, 1, outcome="stopped", continued_by="requeue"),
            lambda: run.next_attempt() and write(run, 2, "controller.0.log", "again\n"),
            lambda: note(run, 2, outcome="done", job_id="700"),
            lambda: (run.attempt(2) / "controller.0.log").open("a").write("summary\n"),
        ]
    )
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: next(events)())
    assert list(follow_logs(run)) == ["one", "torn", "again", "summary"]


def note(run: RunDir, number: int, **values: str | int) -> None:
    info = run.read_info()
    entries = [a for a in info["attempts"] if a["number"] != number]
    old = next((a for a in info["attempts"] if a["number"] == number), {"started": 0.0})
    run.run_json.write_text(
        json.dumps({**info, "attempts": [*entries, {**old, "number": number, **values}]})
    )


def test_following_a_job_that_waits_ends_when_it_is_cancelled(
    slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(jobs=["700"])
    slurm.answer("squeue", (0, "700+0|PENDING||None\n", ""), (0, "700+0|CANCELLED||None\n", ""))
    monkeypatch.setattr(logs, "_ASK_S", 0.0)
    monkeypatch.setattr(logs, "_POLL_S", 0.0)
    assert list(follow_logs(run)) == []


def test_lines_are_handed_on_while_the_file_grows(run: RunDir) -> None:
    lines: Iterator[str] = follow_logs(run, "trainer", rank=0)
    assert next(lines) == "rank zero"
    with (run.attempt(2) / "trainer.0.log").open("a") as file:
        file.write("more\n")
    assert list(lines) == ["more"]
