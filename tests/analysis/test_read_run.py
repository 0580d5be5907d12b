"""A run folder read: tables, frames, lineage, accounting, single rollouts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from synthetic_run import (
    Plan,
    begin_attempt,
    begin_run,
    end_attempt,
    make_group,
    make_run,
    open_store,
    write_attempt,
)

from analysis.accounting import accounting, check_files
from analysis.read_run import Run
from analysis.rollout_stats import rollout_stats, zero_spread_share
from analysis.timeline import overlap
from analysis.tokens import coloured_pieces, load_tokenizer, ratio_level, token_texts, visible
from llamarl_hpc.errors import ConfigError, RunDirError
from llamarl_hpc.observability.metrics_file import MetricsFile
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.atomic import write_json
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import Status

SMALL = Plan(num_steps=6, prompts_per_step=2, num_generations=3, heldout=8, eval_steps=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("runs") / "r1", SMALL))


def resumed_run(path: Path) -> RunDir:
    """Killed at step 5 of 6, resumed from the checkpoint of step 3."""
    run = begin_run(path, SMALL)
    write_attempt(run, SMALL, attempt=1, steps=range(5), close=False)
    write_attempt(run, SMALL, attempt=2, steps=range(3, 6))
    end_attempt(run, 2, "done")
    return run


def lost(record: GroupRecord, status: Status, reason: str, **changes: Any) -> GroupRecord:
    return msgspec.structs.replace(
        record,
        status=status,
        reason=reason,
        step=-1,
        staleness=-1,
        advantage=[],
        logprobs_trainer=[],
        **changes,
    )


# ---------------------------------------------------------------- tables


def test_frames_have_a_row_per_group_and_per_rollout(finished: Run) -> None:
    groups = finished.groups(purpose="train")
    assert len(groups) == 12 and set(groups["status"]) == {"trained"}
    frame = finished.rollouts(purpose="train", steps=(2, 3), text=True)
    assert len(frame) == 2 * 2 * 3
    assert sorted(set(frame["step"])) == [2, 3]
    assert set(frame["generator"]) == {"generator.0", "generator.1"}
    assert frame["prompt"][0].startswith("<|im_start|>user\nWhat is ")
    assert frame["completion"].str.endswith(".").all()
    total = frame["rewards/math_answer"] + frame["rewards/brevity"]
    np.testing.assert_allclose(frame["reward"], total)
    assert (frame["prompt_length"] > 20).all() and (frame["epoch"] == 0).all()


def test_numpy_columns_are_the_same_as_the_frame(finished: Run) -> None:
    mask = finished.group_mask(purpose="train", status="trained")
    block = finished.table("rollouts", ["reward", "step", "rewards/brevity"], mask)
    frame = finished.rollouts(purpose="train")
    np.testing.assert_array_equal(block["reward"], frame["reward"])
    np.testing.assert_array_equal(block["rewards/brevity"], frame["rewards/brevity"])


def test_an_unknown_status_names_the_known_ones(finished: Run) -> None:
    with pytest.raises(ConfigError, match=r"status is one of trained, dropped, .*; got 'lost'"):
        finished.group_mask(status="lost")


def test_one_rollout_has_its_tokens_spans_and_data_row(finished: Run) -> None:
    first = finished.rollouts(purpose="train")["rollout_id"][0]
    rollout = finished.rollout(int(first))
    record = make_group(SMALL, 1, 0, 0)
    assert rollout.token_ids.tolist() == record.completions[0].token_ids.tolist()
    assert rollout.text == record.completions[0].text
    assert rollout.columns == record.prompt.columns
    assert rollout.prompt_ids.tolist() == record.prompt.token_ids.tolist()
    assert rollout.versions == record.completions[0].versions
    assert rollout.rewards == {n: v[0] for n, v in record.rewards.items()}
    np.testing.assert_allclose(
        np.log(rollout.ratio),
        record.logprobs_trainer[0] - record.completions[0].logprobs,
        atol=1e-6,
    )
    with pytest.raises(KeyError):
        finished.rollout(17)


def test_metrics_evaluations_and_spans(finished: Run) -> None:
    metrics = finished.metrics()
    assert metrics.index.tolist() == list(range(6))
    assert (metrics["policy_version"] == metrics.index + 1).all()
    assert [e.policy_version for e in finished.evaluations()] == [0, 3, 6]
    last = finished.evaluations()[-1]
    assert last.accuracy == last.num_correct / 8 and last.interval[0] < last.accuracy
    assert {s.executor for s in finished.spans()} >= {"trainer", "generator.1", "reward"}
    together = overlap(finished)
    assert together is not None and together.num_steps == 5
    assert together.step_s == pytest.approx(8.0, abs=1e-3)
    assert 0.7 < together.share_of_bound < 0.9


def test_a_copied_folder_reads_alike_and_a_folder_above_finds_the_run(
    finished: Run, tmp_path: Path
) -> None:
    shutil.copytree(finished.dir.path, tmp_path / "copy" / "r1")
    copy = Run.open(tmp_path / "copy")
    assert copy.rollouts().equals(finished.rollouts())
    with pytest.raises(RunDirError, match="is not a run folder"):
        Run.open(tmp_path / "nowhere")


def test_figures_by_status_step_and_staleness(finished: Run) -> None:
    figures = rollout_stats(finished, num_ranges=3)
    assert figures["groups"] == {"trained": 12, "evaluation": 24}
    assert figures["trained_rollouts"] == 36
    ranges = [(r["first_step"], r["last_step"], r["rollouts"]) for r in figures["by_steps"]]
    assert ranges == [(0, 1, 12), (2, 3, 12), (4, 5, 12)]
    assert sum(row["rollouts"] for row in figures["by_staleness"]) == 36
    frame = finished.rollouts(purpose="train", steps=(2, 3))
    assert figures["by_steps"][1]["reward_mean"] == pytest.approx(frame["reward"].mean())
    spread = finished.rollouts(purpose="train").groupby("group_id")["reward"].nunique()
    assert zero_spread_share(finished) == pytest.approx((spread == 1).mean())


# ---------------------------------------------------------------- resume and accounting


def test_after_a_resume_every_group_is_seen_once(tmp_path: Path) -> None:
    run = Run(resumed_run(tmp_path / "r"))
    groups = run.groups(purpose="train")
    assert sorted(groups["group_id"]) == list(range(12))
    assert set(groups[groups["step"] >= 3]["attempt"]) == {2}
    assert set(groups[groups["step"] < 3]["attempt"]) == {1}
    assert len(run.groups(purpose="train", lineage="all")) == 12 + 4
    assert run.metrics()["attempt"].tolist() == [1, 1, 1, 2, 2, 2]
    assert [e.policy_version for e in run.evaluations()] == [0, 3, 6]
    account = accounting(run)
    assert account.counts == {"trained": 12} and account.num_superseded == 4
    assert account.violations == [] and account.is_sound
    assert check_files(run) == []


def test_dropped_and_abandoned_groups_are_counted_with_their_reasons(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", SMALL)
    begin_attempt(run, 1, resumed_from_step=0, started=0.0)
    with open_store(run, 1) as store:
        store.append(make_group(SMALL, 1, 0, 0))
        store.append(lost(make_group(SMALL, 1, 1, 0), Status.DROPPED, "too stale"))
        store.append(
            lost(
                make_group(SMALL, 1, 2, 0),
                Status.ABANDONED,
                "the run was stopped",
                completions=[],
                rewards={},
                reward=[],
            )
        )
    end_attempt(run, 1, "stopped")
    account = accounting(Run(run))
    assert account.counts == {"trained": 1, "dropped": 1, "abandoned": 1}
    assert account.reasons == {"dropped: too stale": 1, "abandoned: the run was stopped": 1}
    assert (account.num_issued, account.num_rollouts, account.violations) == (3, 6, [])


def test_every_kind_of_fault_is_named(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", SMALL)
    begin_attempt(run, 1, resumed_from_step=0, started=0.0)
    with open_store(run, 1) as store:
        store.append(make_group(SMALL, 1, 0, 0))
        store.append(make_group(SMALL, 1, 0, 1))
        store.append(lost(make_group(SMALL, 1, 2, 0), Status.DROPPED, ""))
        store.append(msgspec.structs.replace(make_group(SMALL, 1, 3, 3), staleness=2))
        store.append(make_group(Plan(num_generations=2), 1, 5, 1))
    live = accounting(Run(run))
    assert live.in_flight == [1, 4]
    assert not any("never resolved" in violation for violation in live.violations)
    end_attempt(run, 1, "done")
    assert accounting(Run(run)).violations == [
        "group 0 was trained more than once",
        "groups 1, 4 were issued and never resolved, though the run has ended",
        "no rollouts of optimizer steps 2, though later ones are there",
        "group 5 was trained with a number of completions other than 3",
        "group 3 was trained with a staleness above the bound of 1",
        "group 2 was dropped or abandoned without a reason",
    ]


def test_steps_whose_rollouts_never_reached_the_disk_are_named(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", SMALL)
    write_attempt(run, SMALL, attempt=1, steps=range(3))
    metrics = MetricsFile(run.metrics, attempt=1)
    for step in (3, 4):
        metrics.step(step, {"reward/mean": 0.5})
    metrics.close()
    assert accounting(Run(run)).violations == []  # it goes on, or was killed
    end_attempt(run, 1, "failed")
    assert accounting(Run(run)).violations == [
        "optimizer steps 3, 4 were made (metrics.jsonl), but left no rollouts here"
    ]


def test_groups_that_a_short_resume_did_not_come_to_again_are_not_lost(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", SMALL)
    write_attempt(run, SMALL, attempt=1, steps=range(4))
    end_attempt(run, 1, "failed")
    begin_attempt(run, 2, resumed_from_step=2, started=time.time())
    end_attempt(run, 2, "failed")  # during its start-up
    account = accounting(Run(run))
    assert account.in_flight == [4, 5, 6, 7] and account.violations == []

    begin_attempt(run, 3, resumed_from_step=2, started=time.time())
    with open_store(run, 3) as store:  # it came to group 6, and lost 4 and 5
        store.append(make_group(SMALL, 3, 6, 3))
    end_attempt(run, 3, "failed")
    account = accounting(Run(run))
    assert account.in_flight == [7]
    assert any(v.startswith("groups 4, 5 were issued and never") for v in account.violations)


def test_each_attempt_is_held_to_its_own_staleness_bound(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "r", SMALL)
    for number, step, bound in ((1, 0, 2), (2, 1, 1)):
        begin_attempt(run, number, resumed_from_step=step, started=0.0)
        info = run.read_info()
        info["attempts"][-1]["max_staleness"] = bound
        write_json(run.run_json, info)
        with open_store(run, number) as store:
            for group in (2 * step, 2 * step + 1):
                record = make_group(SMALL, number, group, step)
                store.append(msgspec.structs.replace(record, staleness=2))
        end_attempt(run, number, "stopped")
    assert accounting(Run(run)).violations == [
        "groups 2, 3 were trained with a staleness above the bound of 1"
    ]


def test_a_run_that_has_only_begun_is_readable(tmp_path: Path) -> None:
    run = Run(begin_run(tmp_path / "r", SMALL))
    assert len(run.rollouts()) == len(run.groups()) == len(run.metrics()) == 0
    assert run.evaluations() == [] and run.spans() == [] and overlap(run) is None
    assert accounting(run).num_issued == 0 and not run.has_ended
    assert rollout_stats(run)["by_steps"] == []


def test_refresh_sees_what_has_come_since(tmp_path: Path) -> None:
    folder = begin_run(tmp_path / "r", SMALL)
    run = Run(folder)
    assert len(run.rollouts()) == 0
    write_attempt(folder, SMALL, attempt=1, steps=range(2), close=False)
    assert len(run.rollouts()) == 0
    run.refresh()
    assert len(run.rollouts(purpose="train")) == 12 and len(run.metric_rows()) == 2


# ---------------------------------------------------------------- tokens


def test_what_a_terminal_would_obey_is_made_visible() -> None:
    assert visible("a\tb\n\x1b[2J\x07\x7f\x9b") == "a\tb\n\u241b[2J\u2407\u2421\ufffd"


def test_pieces_of_text_join_to_the_decoded_whole(finished: Run) -> None:
    tokenizer = load_tokenizer(finished)
    assert tokenizer is not None
    text = "The sum \u00e9\u4e16\U0001f600 is 12."
    ids = tokenizer.encode(text).ids
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    rollout = finished.rollout_at(finished.store.num_rows("rollouts") - 1)
    joined = "".join(piece for piece, _ in coloured_pieces(tokenizer, rollout))
    assert joined == rollout.text + "<|im_end|>"
    assert coloured_pieces(None, rollout) == [(rollout.text, 0)]


@pytest.mark.parametrize(
    ("ratio", "level"),
    [(1.0, 0), (1.04, 0), (1.06, 1), (1.3, 2), (2.1, 3), (0.94, -1), (0.79, -2), (0.4, -3)],
)
def test_levels_of_the_ratio(ratio: float, level: int) -> None:
    assert ratio_level(ratio) == level
    assert ratio_level(float("nan")) == 0
