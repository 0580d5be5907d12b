"""sacct is asked for the jobs that run.json names, and for nothing without any."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl_hpc.launch.queue import Answer
from llamarl_hpc.launch.usage import job_ids, usage_text

INFO = {
    "created": 1.7e9,
    "jobs": [{"id": "7", "cluster": "big"}, {"id": "9", "cluster": "big"}],
    "attempts": [{"job_id": "7"}, {"job_id": "8"}, {"job_id": None}],
}


def test_all_jobs_are_asked_for_at_once() -> None:
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> Answer:
        asked.append(argv)
        return Answer(returncode=0, stdout="7|...\n", stderr="")

    assert job_ids(INFO) == ["7", "9", "8"]
    assert usage_text(INFO, run) == "7|...\n"
    (argv,) = asked
    assert argv[0] == "sacct" and "--jobs=7,9,8" in argv and "--clusters=big" in argv
    assert any(word.startswith("--starttime=2023-11-1") for word in argv)


def test_no_job_or_no_answer_is_an_empty_text() -> None:
    def fail(argv: Sequence[str]) -> Answer:
        return Answer(returncode=1, stdout="rubbish", stderr="accounting is off")

    assert usage_text(INFO, fail) == ""
    assert usage_text({"created": 0}, fail) == ""
    assert usage_text({}) == ""
