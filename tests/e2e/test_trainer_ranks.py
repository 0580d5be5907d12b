"""A trainer of two ranks learns what one rank learns, however its state and weights travel."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_run import Start, attempts_of, cli, lines_of, write_run_files

from analysis.accounting import accounting
from analysis.read_run import Run
from llamarl_hpc.models.load import load_trainer_model

pytestmark = [pytest.mark.e2e, pytest.mark.mpi]


@pytest.mark.parametrize(
    ("zero_stage", "transport", "replicas"),
    [(1, "shared_memory", 1), (3, "collective", 2)],
)
def test_two_ranks_train_like_one(
    start: Start,
    undisturbed: Path,
    tmp_path: Path,
    zero_stage: int,
    transport: str,
    replicas: int,
) -> None:
    config = write_run_files(
        tmp_path,
        trainer={"zero_stage": zero_stage},
        generator={"replicas": replicas},
        weight_sync={"transport": transport, "delta": "auto"},
        resources={"trainer": {"ntasks_per_node": 2}},
    )
    folder = tmp_path / "run"
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait("trainer", lambda: "trainer is up" in run.out)
    assert len(run.ranks("trainer")) == 2
    answer = run.finish()
    assert answer.code == 0 and answer.err == "", answer.err
    one = [line["loss"] for line in lines_of(undisturbed) if "step" in line]
    two = [line["loss"] for line in lines_of(folder) if "step" in line]
    assert two == pytest.approx(one, abs=1e-5)
    assert accounting(Run.open(folder)).violations == []

    out = tmp_path / "export"
    assert cli("export", folder, "--out", out).code == 0
    assert (out / "model.safetensors").exists()


def test_either_rank_of_a_trainer_that_is_killed_is_named_and_one_rank_goes_on(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    config = write_run_files(tmp_path, resources={"trainer": {"ntasks_per_node": 2}})
    folder = tmp_path / "run"
    (tmp_path / "slow").touch()
    run = start("run", config, "--run-dir", folder, folder=folder)
    run.wait_for_step(2)
    run.wait("its checkpoint", (folder / "latest.json").exists)  # written beside training
    log = (folder / "attempts" / "1" / "trainer.1.log").read_text()
    (second,) = (pid for pid in run.ranks("trainer") if f"pid {pid}" in log)
    os.kill(second, signal.SIGKILL)
    answer = run.finish(20)
    assert answer.code == 3
    assert "error: trainer rank 1 on " in answer.err
    assert f"trainer rank 1 of 2 on {attempts_of(folder)[0]['host']}, pid {second}" in answer.err

    (tmp_path / "slow").unlink()
    changes = ["resources.trainer.ntasks_per_node=1", "trainer.zero_stage=3"]
    arguments = [word for change in changes for word in ("--set", change)]
    answer = start("resume", folder, *arguments, folder=folder).finish()
    assert answer.code == 0 and answer.err == "", answer.err
    assert "continuing after step 1" in answer.out
    one = [line["loss"] for line in lines_of(undisturbed) if "step" in line]
    both = {line["step"]: line["loss"] for line in lines_of(folder) if "step" in line}
    assert list(both.values()) == pytest.approx(one, abs=1e-5)


def test_a_run_with_lora_draws_from_merged_weights_and_exports_them(
    start: Start, tmp_path: Path
) -> None:
    config = write_run_files(
        tmp_path,
        model={"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}},
        trainer={
            "max_steps": 3,
            "learning_rate": 1e-2,
            "zero_stage": 3,
            "save_best": True,
            "save_steps": 0,
            "save_total_limit": 1,
            "eval_steps": 1,
        },
        weight_sync={"transport": "collective", "delta": "auto"},
    )
    folder = tmp_path / "run"
    answer = start("run", config, "--run-dir", folder, folder=folder).finish()
    assert answer.code == 0 and answer.err == "", answer.err
    steps = [line for line in lines_of(folder) if "step" in line]
    assert [line["policy_version"] for line in steps] == [1, 2, 3]
    # the generator sampled with what the trainer computes with: merged or side by side
    assert max(abs(line["mismatch/kl"]) for line in steps) < 1e-4
    # and got all of version 0, but of those after it only what LoRA has changed
    shares = [line["weight_sync/sent_share"] for line in steps]
    assert shares[0] == 1.0 and max(shares[1:]) < 0.5
    measured = {
        line["policy_version"]: line["eval/heldout/avg@1"]
        for line in lines_of(folder)
        if line.get("event") == "eval"
    }
    best = json.loads((folder / "best.json").read_text())
    assert best["accuracy"] == max(measured[v] for v in (1, 2, 3))
    assert best["accuracy"] == measured[best["policy_version"]]
    assert cli("export", folder, "--out", tmp_path / "best", "--best").code == 0
    assert cli("export", folder, "--out", tmp_path / "merged").code == 0
    assert cli("export", folder, "--out", tmp_path / "adapter", "--adapter").code == 0
    merged = load_trainer_model(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(
        load_trainer_model(tmp_path / "model"), str(tmp_path / "adapter")
    )
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert (merged(ids).logits - adapted(ids).logits).abs().max() < 1e-4
        base = load_trainer_model(tmp_path / "model")
        assert (merged(ids).logits - base(ids).logits).abs().max() > 1e-3
