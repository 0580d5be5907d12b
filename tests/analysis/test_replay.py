"""rollouts replay: another reward over the completions that a run stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import Plan, make_run

from analysis.read_run import Run
from analysis.replay import Rescoring, StoredGroup, compare, stored_groups
from llamarl_hpc.run_dir import RunDir

SMALL = Plan(num_steps=4, prompts_per_step=2, num_generations=3, heldout=4, eval_steps=2)
REWARDS = """
def brief(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer)
    return [-float(len(text)) for text in completions]

def broken(prompts, completions, **columns):
    raise ValueError("never")

def grumpy(prompts, completions, **columns):
    if "7" in prompts[0]:
        raise ValueError("I do not like this one")
    return [None] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "r1", SMALL)


def test_groups_come_as_a_reward_function_sees_them(folder: RunDir) -> None:
    run = Run(folder)
    groups = list(stored_groups(run, purpose="train", steps=(1, 2)))
    assert [(g.step, g.group_id) for g in groups] == [(1, 2), (1, 3), (2, 4), (2, 5)]
    frame = run.rollouts(text=True, purpose="train", steps=(1, 2))
    assert [t for g in groups for t in g.completions] == frame["completion"].tolist()
    assert [i for g in groups for i in g.rollout_ids] == frame["rollout_id"].tolist()
    assert [r for g in groups for r in g.rewards] == frame["reward"].tolist()
    assert groups[0].prompt == frame["prompt"][0]
    assert groups[0].columns["question"] in groups[0].prompt


def test_turned_counts_rollouts_that_would_be_pushed_the_other_way() -> None:
    rescoring = Rescoring(["a", "b"])
    group = StoredGroup(
        step=3,
        group_id=0,
        prompt="",
        columns={},
        completions=["x"] * 4,
        rollout_ids=[1, 2, 3, 4],
        rewards=[1.0, 0.0, 0.0, 1.0],
    )
    rescoring.add(group, [1.0, 0.5, 1.0, 0.5], [[1.0, 0.0, 1.0, 0.0], [None, 1.0, None, 1.0]])
    figures = rescoring.figures()
    assert figures["whole"] == {
        "rollouts": 4,
        "old_mean": 0.5,
        "new_mean": 0.75,
        "changed_share": 0.75,
        "turned_share": 0.5,
        "correlation": pytest.approx(0.0),
        "rewards/a/mean": 0.5,
        "rewards/b/mean": 1.0,
    }
    assert [row["step"] for row in figures["by_step"]] == [3]
    assert compare(rescoring.columns(), np.zeros(4, dtype=bool)) == {"rollouts": 0}
    assert Rescoring(["a"]).figures()["whole"] == {"rollouts": 0}


def test_replay_prints_writes_and_leaves_the_run_alone(
    folder: RunDir, tmp_path: Path, call: Any
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    reward = f"{tmp_path / 'mine.py'}:brief"
    out, figures_file = tmp_path / "out.jsonl", tmp_path / "f.json"
    code, text, err = call(
        *("rollouts", "replay", folder.path, "--reward", reward, "--reward", f"{reward}=0.5"),
        *("--first-step", "1", "--json", figures_file, "--out", out),
    )
    assert code == 0, text + err
    figures = json.loads(figures_file.read_text())
    frame = Run(folder).rollouts(text=True, purpose="train", steps=(1, 99))
    wanted = -1.5 * frame["completion"].str.len()
    assert figures["rewards"] == ["brief", "brief.2"] and figures["groups_not_scored"] == 0
    assert figures["whole"]["rollouts"] == 18
    assert figures["whole"]["new_mean"] == pytest.approx(wanted.mean())
    assert figures["whole"]["old_mean"] == pytest.approx(frame["reward"].mean())
    assert [row["step"] for row in figures["by_step"]] == [1, 2, 3]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["new"] for row in rows] == pytest.approx(wanted.tolist())
    assert [row["rollout_id"] for row in rows] == frame["rollout_id"].tolist()
    assert rows[0]["rewards/brief"] == -float(len(frame["completion"][0]))
    assert f"{wanted.mean():.3f}" in text
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before


def test_groups_that_cannot_be_scored_are_counted_and_told(
    folder: RunDir, tmp_path: Path, call: Any
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    out = tmp_path / "f.json"
    words = ("--reward", f"{tmp_path / 'mine.py'}:grumpy", "--json", out)
    code, text, err = call("rollouts", "replay", folder.path, *words)
    assert code == 0, text + err
    figures = json.loads(out.read_text())
    prompts = Run(folder).rollouts(text=True, purpose="train")["prompt"]
    failed = int(prompts.str.contains("7").sum()) // 3
    assert 0 < failed < 8 and figures["groups_not_scored"] == failed
    assert figures["whole"]["rewards/grumpy/mean"] is None
    assert f"{failed} groups could not be scored" in text and "I do not like this one" in text


def test_a_replay_that_scores_nothing_is_no_success(
    folder: RunDir, tmp_path: Path, call: Any
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    words = ("rollouts", "replay", folder.path, "--reward")
    code, _, err = call(*words, f"{tmp_path / 'mine.py'}:broken")
    assert code == 2 and "none of 8 groups could be scored" in err and "never" in err
    code, _, err = call(*words, "math_answer", "--first-step", "9")
    assert code == 2 and "no completion of purpose train fits" in err and "steps 0 to 3" in err
    code, text, _ = call(*words, "math_answer", "--purpose", "eval")
    steps = [line.split()[0] for line in text.splitlines()[3:]]
    assert code == 0 and steps == ["0", "2", "4", "all"]


def test_mistakes_in_the_command_are_one_sentence(
    folder: RunDir, tmp_path: Path, call: Any
) -> None:
    code, _, err = call("rollouts", "replay", folder.path, "--reward", "math_answer=much")
    assert code == 2 and "'much' is not a weight" in err
    inside = folder.path / "rows.jsonl"
    code, _, err = call("rollouts", "replay", folder.path, "--out", inside)
    assert code == 2 and "is inside the run" in err and not inside.exists()
    code, _, err = call("rollouts", "replay", folder.path, "--reward", "nowhere:f")
    assert code == 2 and "nowhere" in err
    code, _, err = call("rollouts", "replay-loss", folder.path, "--step", "99")
    assert code == 2 and "has no figures of step 99; it has 4 steps, from 0 to 3" in err


def test_a_loss_that_is_not_the_logged_one_ends_with_code_1(folder: RunDir, call: Any) -> None:
    code, text, _ = call("rollouts", "replay-loss", folder.path, "--step", "2")
    assert code == 1  # the pretended run logs any loss
    assert "the loss of step 2 is not what was logged" in text


def test_many_wrong_losses_are_counted(tmp_path: Path, call: Any) -> None:
    run = make_run(tmp_path / "long", Plan(num_steps=11, prompts_per_step=1, heldout=2))
    code, text, _ = call("rollouts", "replay-loss", run.path)
    assert code == 1 and "the loss of steps 0, 1, 2, 3, 4, 5, 6, 7 and 3 more is not" in text
