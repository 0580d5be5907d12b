"""The report and the rollouts commands, on a run as it is left by the real writers."""

from __future__ import annotations

import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from synthetic_run import Plan, begin_run, end_attempt, make_run, write_attempt
from test_hacking import falling, flat, honest, rising
from typer.testing import CliRunner
from written_run import Script, write_run

from analysis.charts import nice_ticks, smooth, thin
from analysis.comparison import compare_runs
from analysis.cost import cost_sheet
from analysis.cost_text import cost_lines, executor_rows
from analysis.hacking import watch
from analysis.read_run import Run
from analysis.report import render, write_report
from analysis.report_charts import banded
from analysis.report_compare import render_comparison, write_comparison
from llamarl_hpc.cli import report, rollouts
from llamarl_hpc.errors import ConfigError, RunDirError
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
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.places |= {value or "" for name, value in attrs if name == "id"}
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    # self-contained: nothing is fetched, and links lead to places of the page
    assert [a for a in checker.addresses if a[:1] != "#" or a[1:] not in checker.places] == []
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
    assert text.count("<svg") == 11
    assert text.count('class="b1"') >= 2  # bands of accuracy and reward
    for title in ("Importance ratio", "Off-policy correction", "Generator and trainer"):
        assert f"<b>{title}</b>" in text
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


# ---------------------------------------------------------------- what the sections hold


def test_cost_and_waits_are_those_of_the_library(folder: RunDir) -> None:
    run, text = Run(folder), render(Run(folder))
    sheet = cost_sheet(run)
    for row in executor_rows(sheet):
        assert f'<td>{row[0]}</td><td class="n">{row[1]}</td><td class="n">{row[2]}</td>' in text
    for what, value in cost_lines(sheet):
        assert f"<th>{what}</th><td>{value.replace('+', '&#43;')}</td>" in text
    assert "waits for the generators: " in text and "waits for the trainer: " in text
    assert re.search(r"<td>trainer</td><td class=\"n\">[\d.]+ s</td><td>the generators \d+ %", text)
    assert 'class="onbar"' in text  # step numbers in the timeline


def test_a_flag_has_its_rollouts_one_click_away(flagged: RunDir) -> None:
    run = Run(flagged)
    (flag,) = watch(run).flags
    text = render(run)
    check(text)
    assert flag.kind in text and flag.sentence in html.unescape(text)
    for number in flag.rollout_ids:
        assert f'<a href="#rollout-{number}">{number}</a>' in text
        assert f'id="rollout-{number}"' in text
    assert text.count("flagged: accuracy falls") == len(set(flag.rollout_ids)) == 5


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_run(tmp_path_factory.mktemp("runs") / "hacked", Script(honest, falling))


# ---------------------------------------------------------------- two runs


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Shorter, so it learned less; two groups of a step."""
    plan = Plan(num_steps=8, prompts_per_step=2, num_generations=4, heldout=32, eval_steps=4)
    return make_run(tmp_path_factory.mktemp("runs") / "r2", plan)


def test_a_comparison_holds_both_runs_and_says_what_is_noise(folder: RunDir, other: RunDir) -> None:
    a, b = Run(folder), Run(other)
    text = html.unescape(render_comparison(a, b))
    check(render_comparison(a, b))
    last = a.evaluations()[-1], b.evaluations()[-1]
    for e in last:
        low, high = e.interval
        assert f"{100 * e.accuracy:.1f} %<small>{100 * low:.1f} to {100 * high:.1f} %" in text
    rise = last[1].accuracy - last[0].accuracy
    assert f"B minus A is {100 * rise:+.1f} points" in text
    assert "question by question over 32 in both" in text
    assert "<tr><th>trainer.max_steps</th><td>12</td><td>8</td></tr>" in text
    assert "<tr><th>rollout.prompts_per_step</th><td>3</td><td>2</td></tr>" in text
    assert text.count("<svg") == 10 and text.count('class="b2"') >= 9  # a band of run B in each
    rows = {row.label: row for row in compare_runs(a, b)}
    assert rows["seconds per step"].values == ("8.00", "8.00")
    assert rows["seconds per step"].verdict == "within noise"
    lengths = [
        run.rollouts(purpose="train", steps=steps)["completion_length"].mean()
        for run, steps in ((a, (9, 11)), (b, (6, 7)))
    ]
    assert rows["tokens of a completion"].values == tuple(f"{x:.1f}" for x in lengths)


def test_a_run_compared_with_itself_is_noise_and_one_without_steps_is_compared_too(
    folder: RunDir, tmp_path: Path
) -> None:
    text = html.unescape(render_comparison(Run(folder), Run(folder)))
    assert "more than noise" not in text and "That is within noise" in text
    assert "All 12 steps that are in both trained the same tokens." in text
    assert "<p>Nothing.</p>" in text
    empty = begin_run(tmp_path / "r", PLAN)
    text = render_comparison(Run(folder), Run(empty))
    check(text)
    assert "there is nothing to judge by" in text and "not started" in text


def test_a_clear_gain_is_more_than_noise_and_other_questions_are_no_gain(
    folder: RunDir, flagged: RunDir, tmp_path: Path
) -> None:
    better = write_run(tmp_path / "better", Script(honest, rising, heldout=400))
    worse = write_run(tmp_path / "worse", Script(honest, flat, heldout=400))
    text = html.unescape(render_comparison(Run(worse), Run(better)))
    assert "That is more than noise: B is better on what was measured" in text
    text = html.unescape(render_comparison(Run(folder), Run(flagged)))
    assert "measured on other questions, so this says nothing" in text


# ---------------------------------------------------------------- in a browser


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_headless_chromium_shows_it_without_a_console_message(
    flagged: RunDir, folder: RunDir, other: RunDir, tmp_path: Path, kind: str
) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    page = tmp_path / "page.html"
    if kind == "report":
        write_report(Run(flagged), page)
    else:
        write_comparison(Run(folder), Run(other), page)
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr
    if kind == "report":
        assert "Rollouts to look at" in done.stdout and "accuracy falls" in done.stdout
        assert "36.0 %" in done.stdout  # the last accuracy
    else:
        accuracy = Run(other).evaluations()[-1].accuracy
        assert "Side by side" in done.stdout and f"{100 * accuracy:.1f} %" in done.stdout


# ---------------------------------------------------------------- commands


def test_report_command_says_where_it_wrote(folder: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    result = runner.invoke(app, ["report", str(folder.path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.is_file() and str(out) in result.output.replace("\n", "")


def test_report_compare_writes_beside_the_first_run(
    folder: RunDir, other: RunDir, tmp_path: Path
) -> None:
    words = ["report", str(folder.path), "--compare", str(other.path)]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    page = folder.path / "compare.html"
    assert "compare.html" in result.output.replace("\n", "") and page.is_file()
    page.unlink()


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


def test_bands_are_intervals_of_moving_means_and_leave_no_value() -> None:
    points = [(float(i), float(i % 2)) for i in range(60)]
    means, band = banded(points)
    assert len(means) == len(band) == 60
    assert means[30] == (30.0, pytest.approx(0.4)) and means[0][1] == pytest.approx(0.4)
    pairs = zip(means, band, strict=True)
    assert all(0.0 <= low <= y <= high <= 1.0 for (_, y), (_, low, high) in pairs)
    assert banded([(3.0, 1.5)]) == ([(3.0, 1.5)], [(3.0, 1.5, 1.5)])
    assert banded([]) == ([], [])


def test_where_it_cannot_be_written_another_place_is_asked_for(folder: RunDir) -> None:
    with pytest.raises(ConfigError, match="choose another --out"):
        runner.invoke(
            app,
            ["report", str(folder.path), "--out", str(folder.config / "x.html")],
            catch_exceptions=False,
        )
