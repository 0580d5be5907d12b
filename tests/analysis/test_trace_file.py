"""The trace file of a run: what a viewer needs, and nothing it would refuse."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic_run import Plan, begin_run, end_attempt, write_attempt

from analysis.read_run import Run
from analysis.trace_file import trace_spans
from llamarl_hpc.cli.main import main
from llamarl_hpc.run_dir import RunDir

PLAN = Plan(num_steps=5, prompts_per_step=2, num_generations=2, heldout=4, eval_steps=9, t0=1.7e9)
EXECUTORS = ["run", "generator.0", "generator.1", "reward", "trainer", "controller"]


@pytest.fixture
def resumed(tmp_path: Path) -> RunDir:
    run = begin_run(tmp_path / "r", PLAN)
    write_attempt(run, PLAN, attempt=1, steps=range(3), close=False)
    end_attempt(run, 1, "failed", ended=PLAN.t0 + 70)
    write_attempt(run, PLAN, attempt=2, steps=range(2, 5))
    end_attempt(run, 2, "done", ended=PLAN.t0 + 90)
    return run


def command(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["llamarl-hpc", "trace", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_file_holds_every_executor_over_all_attempts(
    resumed: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new" / "trace.json"
    assert command(monkeypatch, resumed.path, "--out", out) == 0
    trace = json.loads(out.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(order, key=lambda pid: order[pid])] == EXECUTORS
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(trace_spans(Run(resumed))) and {e["ph"] for e in events} == {"M", "X"}
    assert f"{len(spans)} spans" in capsys.readouterr().out
    for event in spans:
        assert event["name"] and event["pid"] in names and isinstance(event["tid"], int)
        assert event["ts"] >= 0.0 and event["dur"] >= 0.0
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(spans))
    assert spans[0]["ts"] == 0.0 and trace["otherData"]["start"] == PLAN.t0 + 40


def test_spans_carry_their_attempt_and_no_executor_does_two_things_at_once(
    resumed: RunDir,
) -> None:
    spans = trace_spans(Run(resumed))
    attempts = [s for s in spans if s.executor == "run"]
    assert [s.name for s in attempts] == ["attempt 1 (failed)", "attempt 2 (done)"]
    assert attempts[1].end == PLAN.t0 + 90
    trained = [(s.args["attempt"], s.args["step"]) for s in spans if s.name == "train"]
    assert trained == [(1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (2, 4)]
    for attempt in (1, 2):
        for executor in EXECUTORS[1:]:
            mine = sorted(
                (s.start, s.end)
                for s in spans
                if s.executor == executor and s.args["attempt"] == attempt
            )
            assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(mine)), executor


def test_without_out_it_lies_in_the_run_and_an_empty_run_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin_run(tmp_path / "r", PLAN)
    assert command(monkeypatch, run.path) == 0
    assert json.loads((run.path / "trace.json").read_text())["traceEvents"] == []
    assert command(monkeypatch, run.path, "--out", run.config / "x.json") == 2
    assert "choose another --out" in capsys.readouterr().err
