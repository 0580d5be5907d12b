"""The cost sheet: device-hours, idle share, waits and lost work, from made-up figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from synthetic_run import Plan, begin_run, end_attempt, write_attempt
from typer.testing import CliRunner
from written_run import Answer, Script, write_run

from analysis.cost import CORE, GPU, cost_sheet, held_devices
from analysis.cost_text import cost_lines, duration, executor_rows, hours
from analysis.read_run import Run
from llamarl_hpc.cli import rollouts
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json

PLAN = Plan(
    num_steps=12, prompts_per_step=3, num_generations=4, heldout=400, eval_steps=6, t0=1.7e9
)
SACCT = """\
77+0|2026-12-01T01:00:00|2026-12-01T01:00:00|2026-12-01T01:30:00|2026-12-01T03:30:00|7200|8|cpu=8,gres/gpu=4,node=1
77+0.batch|2026-12-01T01:00:00|2026-12-01T01:00:00|2026-12-01T01:30:00|2026-12-01T03:30:00|7200|8|
77+1|2026-12-01T01:00:00|2026-12-01T01:00:00|2026-12-01T01:30:00|2026-12-01T03:30:00|7200|16|cpu=16
"""


@pytest.fixture
def resumed(tmp_path: Path) -> RunDir:
    """Two attempts: 0..7 was killed, 6..11 did two of its steps again."""
    run = begin_run(tmp_path / "r", PLAN)
    write_attempt(run, PLAN, attempt=1, steps=range(8), close=False)
    write_attempt(run, PLAN, attempt=2, steps=range(6, 12))
    end_attempt(run, 2, "done", ended=PLAN.t0 + 300)
    info = run.read_info()
    for attempt in info["attempts"]:
        attempt["job_id"] = "77"
    info["attempts"][0] |= {"started": PLAN.t0, "ended": PLAN.t0 + 120}
    info["attempts"][1]["started"] = PLAN.t0 + 150
    write_json(run.run_json, info | {"jobs": [{"id": "77", "submitted": PLAN.t0 - 600}]})
    set_resources(run, {"trainer": {"gpus_per_node": 4}, "generator": {"cpus_per_task": 3}})
    return run


def set_resources(run: RunDir, blocks: dict[str, dict[str, int]]) -> None:
    config = yaml.safe_load(run.config.read_text())
    for name, values in blocks.items():
        config["resources"][name] |= values
    run.config.write_text(yaml.safe_dump(config))


def test_devices_are_held_from_start_to_end_of_every_attempt(resumed: RunDir) -> None:
    sheet = cost_sheet(Run(resumed))
    held_h = (120 + 150) / 3600
    by_name = {cost.executor: cost for cost in sheet.executors}
    assert by_name["trainer"].hours == pytest.approx(4 * held_h)
    assert (by_name["trainer"].unit, by_name["generator.0"].unit) == (GPU, CORE)
    assert by_name["generator.1"].hours == pytest.approx(3 * held_h)
    assert sheet.totals == {GPU: pytest.approx(4 * held_h), CORE: pytest.approx(7 * held_h)}
    assert sheet.wall_s == pytest.approx(270) and sheet.attempts == 2
    # 8 and 6 steps of 5.5 s (training and handing over), as far as they lie within the attempts
    worked = sum(
        min(PLAN.t0 + 40 + 8 * step + 8, end) - max(PLAN.t0 + 40 + 8 * step + 2.5, start)
        for start, end, steps in ((PLAN.t0, PLAN.t0 + 120, range(8)),)
        for step in steps
    )
    assert by_name["trainer"].idle_share == pytest.approx(1 - worked / 270, abs=0.01)
    assert sheet.idle_hours[GPU] == pytest.approx(by_name["trainer"].idle_hours)


def test_lost_work_is_what_a_resume_did_again(resumed: RunDir) -> None:
    run = Run(resumed)
    lost = cost_sheet(run).lost
    assert (lost.steps, lost.step_s, lost.between_s) == (2, 16.0, pytest.approx(30.0))
    assert lost.rollouts == 2 * 3 * 4
    frame = run.rollouts(lineage="all", purpose="train")
    gone = frame[(frame["attempt"] == 1) & (frame["step"] >= 6)]
    assert lost.tokens == gone["completion_length"].sum() > 0
    assert lost.start_s == pytest.approx(42.5)  # the second attempt's first training came before it


def test_rates_are_per_trained_rollout_and_per_sure_point(resumed: RunDir) -> None:
    run = Run(resumed)
    sheet = cost_sheet(run)
    assert sheet.trained_rollouts == 12 * 3 * 4
    assert sheet.per_1000_rollouts[GPU] == pytest.approx(1000 * sheet.totals[GPU] / 144)
    first, *_, last = run.evaluations()
    gain = last.accuracy - first.accuracy
    assert sheet.accuracy_gain == pytest.approx(gain) and gain > 0.2
    assert sheet.per_accuracy_point[CORE] == pytest.approx(sheet.totals[CORE] / (100 * gain))


def test_a_gain_within_noise_has_no_price(tmp_path: Path) -> None:
    script = Script(lambda *_: Answer("x", {"r": 1.0}), lambda progress: 0.5 + 0.02 * progress)
    sheet = cost_sheet(Run(write_run(tmp_path / "r", script)))
    assert sheet.per_accuracy_point == {}
    assert dict(cost_lines(sheet))["per point of accuracy"].endswith("are within noise")
    assert sheet.queue_wait_s is None and sheet.billed is None


def test_the_queue_wait_is_slurms_or_from_submission_to_the_first_attempt(
    resumed: RunDir,
) -> None:
    assert cost_sheet(Run(resumed)).queue_wait_s == pytest.approx(600.0)
    sheet = cost_sheet(Run(resumed), sacct=SACCT)
    assert sheet.queue_wait_s == 1800.0
    assert sheet.billed is not None
    assert (sheet.billed.jobs, sheet.billed.gpu_hours, sheet.billed.core_hours) == (1, 8.0, 48.0)
    assert ("billed by Slurm", "8 GPU-hours, 48 core-hours") in cost_lines(sheet)


def test_replicas_nodes_and_a_reference_of_its_own_are_counted(resumed: RunDir) -> None:
    set_resources(
        resumed,
        {"trainer": {"nodes": 2}, "generator": {"nodes": 1, "ntasks_per_node": 2}},
    )
    config = yaml.safe_load(resumed.config.read_text())
    config["reference"] = {"placement": "executor"}
    config["algorithm"]["beta"] = 0.1
    resumed.config.write_text(yaml.safe_dump(config))
    assert held_devices(Run(resumed)) == [
        ("trainer", 8, GPU),
        ("generator.0", 6, CORE),
        ("generator.1", 6, CORE),
        ("reward", 1, CORE),
        ("reference", 1, CORE),
    ]


def test_a_run_that_goes_on_or_has_not_begun_has_a_sheet(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", PLAN)
    empty = cost_sheet(Run(run))
    assert empty.wall_s == 0.0 and empty.totals == {CORE: 0.0} and empty.per_1000_rollouts == {}
    write_attempt(run, PLAN, attempt=1, steps=range(2), close=False)
    going = cost_sheet(Run(run))
    assert going.wall_s > 0 and going.lost.steps == 0
    assert not np.isnan(list(going.totals.values())).any()


def test_stats_prints_the_sheet_and_writes_it(resumed: RunDir, tmp_path: Path) -> None:
    app = typer.Typer()
    rollouts.register(app)
    out = tmp_path / "f.json"
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        app, ["rollouts", "stats", str(resumed.path), "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    cost = json.loads(out.read_text())["cost"]
    assert cost["lost"]["steps"] == 2 and cost["executors"][0]["executor"] == "trainer"
    assert "steps done again" in result.output and "2, 16.0 s" in result.output
    for row in executor_rows(cost_sheet(Run(resumed))):
        assert row[0] in result.output and row[2] in result.output


def test_figures_in_words() -> None:
    assert [hours(x) for x in (0.01234, 12.34, 12_345.6)] == ["0.0123", "12.3", "12,346"]
    assert [duration(x) for x in (1.23, 120.0, 7200.0)] == ["1.2 s", "2 min", "2.0 h"]
