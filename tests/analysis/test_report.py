"""The report and the rollouts commands, on a run as it is left by the real writers."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from synthetic_run import Plan, begin_run, end_attempt, make_run, write_attempt
from typer.testing import CliRunner

from analysis.charts import nice_ticks, smooth, thin
from analysis.read_run import Run
from analysis.report import render, write_report
from llamarl_hpc.cli import report, rollouts
from llamarl_hpc.errors import RunDirError
from llamarl_hpc.run_dir import RunDir

PLAN = Plan(num_steps=12, prompts_per_step=3, num_generations=4, heldout=32, eval_steps=6)
runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"})
app = typer.Typer()
rollouts.register(app)
report.register(app)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "r1", PLAN)


class Checker(html.parser.HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = ("meta", "br", "link", "img", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.addresses == []  # self-contained: nothing is fetched
    assert "<script" not in text and "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", text)


def test_the_report_holds_the_numbers_of_the_run(folder: RunDir) -> None:
    run = Run(folder)
    path = write_report(run)
    assert path == folder.report
    text = path.read_text()
    check(text)
    first, last = run.evaluations()[0], run.evaluations()[-1]
    assert f"{100 * first.accuracy:.1f} %" in text
    assert f"{100 * last.accuracy:.1f} %" in text
    gain = f"{100 * (last.accuracy - first.accuracy):+.1f} points"
    assert gain in text.replace("&#43;", "+")
    assert f"{last.num_correct:g} of 32; 95 %: {100 * last.interval[0]:.1f} to" in text
    assert '<div class="value">8.0</div>' in text  # seconds per step
    assert '<div class="value">144</div>' in text  # rollouts
    assert text.count('<article class="card"') == 12
    assert text.count("<svg") == 9
    assert 'class="state good">done<' in text
    assert "at most" in text and "generator.1" in text


def test_a_half_written_run_has_a_report_too(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", PLAN)
    text = render(Run(run))
    check(text)
    assert "not started" in text and "no data yet" in text
    write_attempt(run, PLAN, attempt=1, steps=range(1), close=False)
    with open(run.metrics, "a") as file:
        file.write('{"step": 1, "rew')
    text = render(Run(run))
    check(text)
    assert "going on" in text and "last sign of life" in text
    assert "Too few steps yet" in text


def test_a_resumed_and_failed_run_shows_its_attempts(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", PLAN)
    write_attempt(run, PLAN, attempt=1, steps=range(8), close=False)
    write_attempt(run, PLAN, attempt=2, steps=range(6, 10))
    end_attempt(run, 2, "failed")
    text = render(Run(run))
    check(text)
    assert 'class="state bad">failed<' in text
    assert "rows a resume threw away" in text
    assert "<td>2</td><td>6</td>" in text


def test_what_a_model_wrote_cannot_break_the_page(folder: RunDir) -> None:
    assert "<|im_end|>" not in render(Run(folder))
    assert "&lt;|im_end|&gt;" in render(Run(folder))


def test_headless_chromium_shows_it_without_a_console_message(
    folder: RunDir, tmp_path: Path
) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    page = write_report(Run(folder), tmp_path / "report.html")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    assert "Rollouts to look at" in done.stdout


# ---------------------------------------------------------------- commands


def test_report_command_says_where_it_wrote(folder: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    result = runner.invoke(app, ["report", str(folder.path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.is_file() and str(out) in result.output.replace("\n", "")


def test_show_renders_the_newest_that_fit(folder: RunDir) -> None:
    result = runner.invoke(
        app, ["rollouts", "show", str(folder.path), "--step", "4", "--limit", "2"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("step 4, group 14") == 2
    assert "What is " in result.output and "math_answer" in result.output
    assert "probability under the trainer" in result.output
    only = runner.invoke(app, ["rollouts", "show", str(folder.path), "--group", "3"])
    assert only.output.count("group 3 ") == 4 and only.output.count("question 3 ") == 1
    evaluated = runner.invoke(
        app, ["rollouts", "show", str(folder.path), "--purpose", "eval", "--limit", "1"]
    )
    assert "evaluation of version 12" in evaluated.output
    nothing = runner.invoke(app, ["rollouts", "show", str(folder.path), "--status", "dropped"])
    assert nothing.exit_code == 0 and "no rollout fits" in nothing.output


def test_show_one_rollout_by_its_id(folder: RunDir) -> None:
    identity = str(int(Run(folder).rollouts(purpose="train")["rollout_id"][5]))
    result = runner.invoke(app, ["rollouts", "show", str(folder.path), "--rollout", identity])
    assert f"rollout {identity}" in result.output
    missing = runner.invoke(app, ["rollouts", "show", str(folder.path), "--rollout", "5"])
    assert "no rollout 5 in" in str(missing.exception)


def test_colour_follows_the_ratio(folder: RunDir) -> None:
    result = runner.invoke(
        app,
        ["rollouts", "show", str(folder.path), "--step", "4", "--limit", "8"],
        env={"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )
    assert "48;2;" in result.output  # 24-bit backgrounds


def test_stats_prints_and_writes_the_same_figures(folder: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "stats.json"
    result = runner.invoke(app, ["rollouts", "stats", str(folder.path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert figures["groups"] == {"trained": 36, "evaluation": 96}
    assert len(figures["by_steps"]) == 8
    assert f"{figures['by_steps'][0]['reward_mean']:.3f}" in result.output


def test_verify_is_content_with_a_sound_run_and_names_faults(
    folder: RunDir, tmp_path: Path
) -> None:
    good = runner.invoke(app, ["rollouts", "verify", str(folder.path)])
    assert good.exit_code == 0 and "every issued group is accounted for" in good.output
    shutil.copytree(folder.path, tmp_path / "r")
    segment = tmp_path / "r" / "rollouts" / "segment_000000.h5"
    segment.write_bytes(segment.read_bytes()[:5000])
    out = tmp_path / "verify.json"
    bad = runner.invoke(app, ["rollouts", "verify", str(tmp_path / "r"), "--json", str(out)])
    assert bad.exit_code == 1
    assert "segment_000000.h5 cannot be opened" in " ".join(bad.output.split())
    assert len(json.loads(out.read_text())["violations"]) == 1


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    result = runner.invoke(app, ["rollouts", "stats", str(tmp_path)])
    assert isinstance(result.exception, RunDirError)
    assert "is not a run folder" in str(result.exception)


# ---------------------------------------------------------------- chart arithmetic


def test_ticks_are_round_and_enclose() -> None:
    assert nice_ticks(0.03, 0.97) == [0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(0, 39) == [0, 10, 20, 30, 40]
    assert nice_ticks(-0.013, 0.02)[0] <= -0.013
    assert nice_ticks(5, 5)[0] < 5 < nice_ticks(5, 5)[-1]


def test_thinning_keeps_the_mean_and_smoothing_the_constant() -> None:
    points = [(float(i), 2.0 * i) for i in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(999.0)
    assert smooth([(0.0, 3.0)] * 9, 5) == [(0.0, 3.0)] * 9
