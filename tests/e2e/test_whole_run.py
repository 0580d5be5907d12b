"""Whole runs through the command line, undisturbed: what they leave is right and can be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import torch
from tiny_run import LiveRun, Start, cli, lines_of, losses_of, write_run_files

from analysis.accounting import accounting, check_files
from analysis.read_run import Run
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.checkpoint import CheckpointStore
from llamarl_hpc.training.consolidate import checkpoint_tensors

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]
ORACLE = Path(__file__).parents[2] / "experiments" / "single_process_loop.py"


def test_the_pipeline_equals_the_single_process_loop_bit_for_bit(undisturbed: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ORACLE), str(undisturbed / "config.yaml")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    oracle = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line for line in lines_of(undisturbed) if "step" in line]
    assert [s["loss"].hex() for s in steps] == [o["loss_hex"] for o in oracle]
    assert [s["grad_norm"].hex() for s in steps] == [o["grad_norm_hex"] for o in oracle]
    assert [s["reward/mean"] for s in steps] == [o["reward/mean"] for o in oracle]
    assert len({s["loss"] for s in steps}) == 6
    assert all(s["staleness/max"] == 0 for s in steps)


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished asynchronous run: two replicas, weights that change in flight."""
    files = tmp_path_factory.mktemp("overlapped")
    config = write_run_files(
        files,
        rollout={"max_completion_length": 48},
        algorithm={"max_staleness": 2, "in_flight_weight_updates": True},
        generator={"replicas": 2, "max_concurrency": 8},
        trainer={"max_steps": 10, "save_steps": 4, "eval_steps": 5},
    )
    live = LiveRun("run", config, "--plain", "--run-dir", files / "run", folder=files / "run")
    try:
        answer = live.finish()
    finally:
        live.destroy()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    return files / "run"


def test_one_step_of_staleness_is_used_and_weights_switch_between_completions(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = write_run_files(
        tmp_path, algorithm={"max_staleness": 1}, generator={"replicas": 2, "nice": 5}
    )
    answer = start("run", config, "--run-dir", folder, folder=folder).finish()
    assert answer.code == 0 and answer.err == "", answer.out + answer.err
    steps = [line for line in lines_of(folder) if "step" in line]
    worst = [line["staleness/max"] for line in steps]
    assert worst[0] == 0 and max(worst) == 1, worst
    run = Run.open(folder)
    rollouts = [run.rollout_at(row) for row in range(run.store.num_rows("rollouts"))]
    # a step has the same number on the console, in the metrics and in the store: from 0
    shown = re.findall(r"step +(\d+) \((\d+)/6\)  reward", answer.out)
    assert shown == [(f"{k}", f"{k + 1}") for k in range(6)]
    assert [line["step"] for line in steps] == list(range(6))
    assert {rollout.step for rollout in rollouts if rollout.status == "trained"} == set(range(6))
    assert all(len(rollout.versions) == 1 for rollout in rollouts)
    books = accounting(run)
    assert books.violations == [] and books.counts == {"trained": 24}


def test_an_asynchronous_run_keeps_the_bound_and_uses_it(overlapped: Path) -> None:
    steps = [line for line in lines_of(overlapped) if "step" in line]
    assert [s["step"] for s in steps] == list(range(10))
    worst = [s["staleness/max"] for s in steps]
    assert 0 < max(worst) <= 2, worst
    evaluations = [line for line in lines_of(overlapped) if line.get("event") == "eval"]
    assert [e["policy_version"] for e in evaluations] == [0, 5, 10]


def test_versions_of_every_completion_fit_its_step(overlapped: Path) -> None:
    run = Run.open(overlapped)
    mixed = 0
    for row in range(run.store.num_rows("rollouts")):
        rollout = run.rollout_at(row)
        spans = rollout.versions
        assert spans[0].start == 0 and spans[-1].end == len(rollout.token_ids)
        for before, after in pairwise(spans):
            assert before.end == after.start and before.version < after.version
        mixed += len(spans) > 1
        if rollout.status == "trained":
            assert spans[-1].version <= rollout.step <= spans[0].version + 2
            assert rollout.staleness == rollout.step - spans[0].version
    assert mixed > 0  # else in-flight updates were not tested


@pytest.mark.parametrize("name", ["undisturbed", "overlapped"])
def test_every_group_is_accounted_for(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    verified = cli("rollouts", "verify", folder)
    assert (verified.code, verified.err) == (0, "")
    run = Run.open(folder)
    books = accounting(run)
    assert books.violations == [] and check_files(run) == []
    steps = {"undisturbed": 6, "overlapped": 10}[name]
    assert books.counts["trained"] == 4 * steps
    assert books.num_issued == sum(books.counts.values())


def test_a_file_of_rollouts_says_by_itself_where_they_come_from(undisturbed: Path) -> None:
    run = Run.open(undisturbed)
    said, known = run.store.attributes, run.info
    hashes = ("model_hash", "tokenizer_hash")
    assert [said[name] for name in hashes] == [known[name] for name in hashes]
    assert all(said[name] for name in hashes) and said["run_id"] == known["run_id"]
    assert json.loads(said["versions"]) == known["versions"] | {"git": known["git"]}
    assert said["config"] == (undisturbed / "config.yaml").read_text()


def test_an_export_gives_the_logits_of_the_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "export"
    assert cli("export", undisturbed, "--out", out).code == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "2+5="}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    base = json.loads((undisturbed / "run.json").read_text())["model_folder"]
    reference = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        untrained = reference(ids).logits
        newest = CheckpointStore(RunDir(undisturbed), 2).latest()
        assert newest is not None and newest.step == 6
        tensors = dict(checkpoint_tensors(newest.path, Path(base)))
        reference.load_state_dict(tensors, strict=False)
        reference.tie_weights()
        trained, exported = reference(ids).logits, model(ids).logits
    assert torch.equal(trained, exported)
    assert not torch.allclose(trained, untrained)

    again = cli("export", undisturbed, "--out", out)
    assert again.code == 2 and str(out) in again.err and again.err.count("\n") == 1

    figures = tmp_path / "eval.json"
    config = undisturbed / "config.yaml"
    evaluated = cli("eval", config, "--model", out, "--json", figures)
    assert evaluated.code == 0, evaluated.err
    measured: dict[str, Any] = json.loads(figures.read_text())
    last = [line for line in lines_of(undisturbed) if line.get("event") == "eval"][-1]
    assert measured["num_prompts"] == last["eval/heldout/num_prompts"] == 8
    assert measured["num_correct"] == last["eval/heldout/num_correct"]
    assert measured["mean_length"] == last["eval/heldout/mean_length"]


def test_a_finished_run_can_be_looked_at(overlapped: Path, tmp_path: Path) -> None:
    figures = tmp_path / "status.json"
    status = cli("status", overlapped, "--json", figures)
    assert status.code == 0 and "done" in status.out and "10 of 10" in status.out
    assert json.loads(figures.read_text())["step"] == 10

    stats = cli("rollouts", "stats", overlapped, "--json", figures)
    assert stats.code == 0
    assert json.loads(figures.read_text())["groups"]["trained"] == 40

    shown = cli("rollouts", "show", overlapped, "--step", 3, "--limit", 2)
    assert shown.code == 0 and shown.out.count("step 3, group") == 2
    # a random model writes anything; nothing of it may be a command to the terminal
    assert "Cc" not in {category(character) for character in shown.out if character not in "\n\t"}

    report = cli("report", overlapped)
    assert report.code == 0 and (overlapped / "report.html").stat().st_size > 10_000


def test_nothing_is_left_to_do_in_a_finished_run(undisturbed: Path) -> None:
    before = losses_of(undisturbed)
    resumed = cli("resume", undisturbed, "--plain")
    assert resumed.code == 0
    assert "complete" in resumed.out and "trainer.max_steps" in resumed.out
    assert losses_of(undisturbed) == before
    assert Run.open(undisturbed).attempts[-1].number == 1
