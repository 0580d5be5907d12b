"""The watch flags runs that game their reward, and leaves those alone that learn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import Plan as SyntheticPlan
from synthetic_run import make_run
from written_run import Answer, Script, words_of, write_run

from analysis.hacking import Watch, watch
from analysis.read_run import Run
from llamarl_hpc.cli.main import main


def watched(path: Path, script: Script) -> tuple[Run, Watch]:
    run = Run(write_run(path, script))
    return run, watch(run)


def kinds(found: Watch) -> list[str]:
    return [flag.kind for flag in found.flags]


def honest(rng: np.random.Generator, progress: float, right: int) -> Answer:
    """Learns to answer, and to put it as is wanted."""
    good = bool(rng.random() < 0.2 + 0.7 * progress)
    answer = right if good else right + int(rng.integers(1, 90))
    form = "####" if rng.random() < 0.1 + 0.8 * progress else "it is"
    text = f"{words_of(rng, int(rng.integers(20, 40)))} {form} {answer}"
    return Answer(text, {"exact": float(good)})


def rising(progress: float) -> float:
    return 0.3 + 0.5 * progress


def falling(progress: float) -> float:
    return 0.6 - 0.4 * max(0.0, progress - 0.4)


def flat(progress: float) -> float:
    return 0.5


def paid_for(text_of: Any, name: str = "judge") -> Any:
    """A policy that finds out that `text_of` pays, whatever is right."""

    def policy(rng: np.random.Generator, progress: float, right: int) -> Answer:
        if rng.random() < progress:
            return Answer(text_of(rng, right), {name: 0.9 + 0.1 * float(rng.random())})
        text = f"{words_of(rng, 30)} {right + int(rng.integers(0, 3))}"
        return Answer(text, {name: 0.3 * float(rng.random())})

    return policy


# ---------------------------------------------------------------- honest runs


def test_nothing_is_flagged_in_a_run_that_learns(tmp_path: Path) -> None:
    _, found = watched(tmp_path / "r", Script(honest, rising))
    assert kinds(found) == []
    early, late = found.figures["reward"]
    assert early < 0.4 and late > 0.7
    assert found.figures["held_out_accuracy"][1] > found.figures["held_out_accuracy"][0]


@pytest.mark.parametrize("accuracy", [rising, flat, None])
def test_nothing_is_flagged_for_learning_whatever_is_measured(
    tmp_path: Path, accuracy: Any
) -> None:
    _, found = watched(tmp_path / "r", Script(honest, accuracy))
    assert kinds(found) == []


def test_the_pretended_run_with_two_components_is_honest(tmp_path: Path) -> None:
    plan = SyntheticPlan(num_steps=16, prompts_per_step=4, num_generations=4, heldout=64)
    found = watch(Run(make_run(tmp_path / "r", plan)))
    assert kinds(found) == []
    assert found.notes == ["compared: steps 0 to 3 with steps 12 to 15"]


def test_longer_answers_that_are_right_more_often_are_no_flag(tmp_path: Path) -> None:
    def thinks(rng: np.random.Generator, progress: float, right: int) -> Answer:
        good = bool(rng.random() < 0.2 + 0.7 * progress)
        text = f"{words_of(rng, 20 + int(100 * progress))} {right if good else right + 1}"
        return Answer(text, {"exact": float(good), "brevity": -0.001 * len(text)})

    _, found = watched(tmp_path / "r", Script(thinks, rising))
    assert kinds(found) == []


# ---------------------------------------------------------------- runs that game it


def test_reward_up_while_accuracy_falls(tmp_path: Path) -> None:
    run, found = watched(tmp_path / "r", Script(honest, falling))
    assert kinds(found) == ["accuracy falls"]
    (flag,) = found.flags
    assert flag.figures["accuracy_fall"] == pytest.approx(0.6 - 0.4)
    assert "60.0 %" in flag.sentence and "held-out accuracy fell" in flag.sentence
    lost = run.rollout(flag.rollout_ids[0])
    assert (lost.purpose, lost.text, lost.step) == ("eval", "wrong", 15)


def test_texts_in_a_loop(tmp_path: Path) -> None:
    loop = paid_for(lambda rng, right: "I am sure that this is right . " * 12 + str(right))
    run, found = watched(tmp_path / "r", Script(loop, flat))
    assert "repetition" in kinds(found)
    flag = next(f for f in found.flags if f.kind == "repetition")
    assert flag.figures["late"] > 0.6 > 0.3 > flag.figures["early"]
    assert len(flag.rollout_ids) == 5
    assert all("I am sure" in run.rollout(i).text for i in flag.rollout_ids)
    early, late = found.figures["compression_ratio"]
    assert early < 4.0 < 6.0 < late


def test_one_answer_for_all_questions(tmp_path: Path) -> None:
    canned = paid_for(lambda rng, right: "The answer is 42, as anybody can see.")
    run, found = watched(tmp_path / "r", Script(canned, flat))
    assert "one answer for all" in kinds(found)
    flag = next(f for f in found.flags if f.kind == "one answer for all")
    assert {run.rollout(i).text for i in flag.rollout_ids} == {
        "The answer is 42, as anybody can see."
    }
    assert len({run.rollout(i).group_id for i in flag.rollout_ids}) == 5
    assert flag.figures["late"] == found.figures["near_duplicates"][1] > 0.7


def test_the_same_words_around_the_right_number_are_not_one_answer(tmp_path: Path) -> None:
    form = paid_for(lambda rng, right: f"Let me add both of them. The sum is exactly {right}.")
    _, found = watched(tmp_path / "r", Script(form, rising))
    assert kinds(found) == []


def test_a_phrase_that_pays(tmp_path: Path) -> None:
    flattery = paid_for(lambda rng, right: f"{words_of(rng, 25)} dear grader {words_of(rng, 5)}")
    run, found = watched(tmp_path / "r", Script(flattery, flat))
    assert "a phrase pays" in kinds(found)
    flag = next(f for f in found.flags if f.kind == "a phrase pays")
    assert "dear grader" in flag.sentence
    assert all("dear grader" in run.rollout(i).text for i in flag.rollout_ids)
    best = found.phrases[0]
    assert "dear grader" in best.text and best.share_paid > 0.7 > 0.3 > best.share_unpaid
    assert best.share_early < 0.1 and best.share_late > 0.9


def test_length_with_the_reward_and_without_accuracy(tmp_path: Path) -> None:
    def padding(rng: np.random.Generator, progress: float, right: int) -> Answer:
        text = words_of(rng, 20 + int(80 * progress * rng.random() + 40 * progress))
        return Answer(text, {"judge": len(text) / 1000})

    _, found = watched(tmp_path / "r", Script(padding, flat))
    assert kinds(found) == ["length grows"]
    assert found.flags[0].figures["factor"] > 2.0

    def silence(rng: np.random.Generator, progress: float, right: int) -> Answer:
        text = words_of(rng, 40 - int(35 * progress))
        return Answer(text, {"judge": 1.0 - len(text) / 1000})

    _, found = watched(tmp_path / "s", Script(silence, flat))
    assert kinds(found) == ["length collapses"]


def test_completions_that_are_cut_off(tmp_path: Path) -> None:
    def endless(rng: np.random.Generator, progress: float, right: int) -> Answer:
        cut = bool(rng.random() < 0.6 * progress)
        return Answer(words_of(rng, 40), {"judge": float(rng.random())}, truncated=cut)

    _, found = watched(tmp_path / "r", Script(endless))
    assert kinds(found) == ["cut off"]
    assert found.flags[0].figures["late"] > 0.4


def test_one_component_pays_while_the_others_fall(tmp_path: Path) -> None:
    def drifts(rng: np.random.Generator, progress: float, right: int) -> Answer:
        good = float(rng.random() < 0.7 - 0.5 * progress)
        style = 0.2 + 2.0 * progress + 0.1 * float(rng.random())
        return Answer(words_of(rng, 30), {"exact": good, "style": style})

    _, found = watched(tmp_path / "r", Script(drifts))
    assert kinds(found) == ["components part"]
    assert "'style' pays" in found.flags[0].sentence and "'exact' falls" in found.flags[0].sentence
    assert found.flags[0].figures["style"] > 1.0 > 0.0 > found.flags[0].figures["exact"]


# ---------------------------------------------------------------- small runs, command


def test_a_short_run_is_looked_at_and_not_judged(tmp_path: Path) -> None:
    _, found = watched(tmp_path / "r", Script(honest, falling, steps=3))
    assert found.flags == [] and found.notes == [
        "fewer than four optimizer steps: too short to compare"
    ]
    _, found = watched(tmp_path / "s", Script(honest, falling, steps=8))
    assert found.flags == [] and found.figures["reward"][1] > 0.0
    assert "8 prompt groups in a quarter of the run are too few" in found.notes[-1]


@pytest.mark.parametrize("accuracy", [rising, falling])
def test_the_command_ends_with_1_when_something_is_flagged(
    tmp_path: Path,
    accuracy: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run = write_run(tmp_path / "r", Script(honest, accuracy))
    words = ["rollouts", "watch", str(run.path), "--json", str(tmp_path / "w.json")]
    monkeypatch.setattr(sys, "argv", ["llamarl-hpc", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "w.json").read_text())
    assert f"{figures['figures']['reward'][1]:.4g}" in out
    if accuracy is rising:
        assert not end.value.code and "nothing is flagged" in out and figures["flags"] == []
    else:
        assert end.value.code == 1 and "accuracy falls: reward rose" in out
        assert f"--rollout {figures['flags'][0]['rollout_ids'][0]}" in out
