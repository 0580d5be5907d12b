"""The store holds all that a step was computed from: its loss comes out of it once more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from loss_configs import name_of
from tiny_policy import random_batch, tiny_config

from analysis.read_run import Run
from analysis.step_batch import StoredStep, stored_step, trained_steps
from llamarl_hpc.batching.buffer import split_by_rollout
from llamarl_hpc.config.schema import StorageConfig
from llamarl_hpc.errors import StoreError
from llamarl_hpc.placement import World
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.storage.rollout_store import RolloutWriter
from llamarl_hpc.training.engine import TrainerEngine, TrainResult
from llamarl_hpc.training.replay import advantages_again, replay_loss
from llamarl_hpc.types import (
    Completion,
    FinishReason,
    Prompt,
    Purpose,
    Status,
    TrainBatch,
    VersionSpan,
)

TRAINED = 10  # the policy version that the batch is trained at
LOSSES: list[dict[str, Any]] = [
    {"loss_type": "aipo"},
    {"loss_type": "grpo", "entropy_coef": 0.3},
    {"loss_type": "gspo", "advantage": "group_norm"},
    {"loss_type": "dapo", "mismatch_correction": "truncate", "mismatch_level": "sequence"},
    {"loss_type": "decoupled_ppo"},
    {"loss_type": "grpo", "beta": 0.2},
    {"loss_type": "dr_grpo", "delta": 1.5, "mismatch_correction": "mask", "mismatch_max": 1.2},
]


def batch_with_silent_groups(step: int) -> TrainBatch:
    """Every other group without advantage; a rollout and some tokens masked."""
    batch = random_batch(seed=step, step=step)
    advantages = np.where(batch.group_index % 2 == 0, 0.0, batch.advantages).astype(np.float32)
    mask = batch.loss_mask.copy()
    mask[::7] = False
    changes = {"advantages": advantages, "loss_mask": mask}
    return msgspec.structs.replace(batch, **changes)


def through_the_store(folder: Path, batch: TrainBatch, result: TrainResult) -> StoredStep:
    """Write the batch as a run does, read it back."""
    run = RunDir.create_at(folder)
    run.config.write_text("{}\n")
    parts = {
        name: split_by_rollout(array, batch)
        for name, array in {
            "ids": batch.completion_ids,
            "behaviour": batch.logprobs,
            "mask": batch.loss_mask,
            "trainer": result.logprobs,
            "lags": batch.lags,
            "reference": batch.logprobs_reference,
            "entropy": result.entropy if result.entropy is not None else result.logprobs,
        }.items()
    }
    prompts = np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1])
    with RolloutWriter(
        run.rollouts, attempt=1, config=StorageConfig(), attributes={}, reward_names=["r"]
    ) as writer:
        for group, ids in enumerate(prompts):
            members = np.flatnonzero(batch.group_index == group).tolist()
            writer.append(record(batch, group, ids, members, parts, result.entropy is not None))
            writer.flush(wait=False)  # a step may lie in several files
    opened = Run(run)
    assert trained_steps(opened) == [batch.step]
    return stored_step(opened, batch.step)


def spans(versions: Any) -> list[VersionSpan]:
    """Runs of equal versions."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [VersionSpan(a, b, int(versions[a])) for a, b in pairwise(edges)]


def record(
    batch: TrainBatch, group: int, ids: Any, members: list[int], parts: Any, has_entropy: bool
) -> GroupRecord:
    completions = [
        Completion(
            token_ids=parts["ids"][r],
            logprobs=parts["behaviour"][r],
            versions=spans(TRAINED - parts["lags"][r]),
            finish_reason=FinishReason.LENGTH if r % 2 else FinishReason.STOP,
            text="",
            t_start=1.0,
            t_end=2.0,
        )
        for r in members
    ]
    rewards = [float(batch.advantages[r]) for r in members]
    return GroupRecord(
        purpose=Purpose.TRAIN,
        group_id=100 + group,
        attempt=1,
        issue=1,
        prompt=Prompt(prompt_id=f"{group}", epoch=0, text="", token_ids=ids, columns={}),
        status=Status.TRAINED,
        step=batch.step,
        temperature=batch.temperature,
        staleness=int(max(parts["lags"][r].max() for r in members)),
        completions=completions,
        rewards={"r": rewards},
        reward=rewards,
        advantage=[float(batch.advantages[r]) for r in members],
        logprobs_trainer=[parts["trainer"][r] for r in members],
        loss_mask=[parts["mask"][r] for r in members],
        logprobs_reference=[parts["reference"][r] for r in members],
        entropy=[parts["entropy"][r] for r in members] if has_entropy else [],
        t_issued=1.0,
        t_resolved=2.0,
    )


@pytest.mark.parametrize("algorithm", LOSSES, ids=name_of)
def test_the_loss_of_a_stored_step_is_the_logged_one(
    world: World, model_folder: Path, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    config = tiny_config(algorithm=algorithm, skip_zero_advantage=True)
    engine = TrainerEngine(config, world, model_folder)
    engine.train_step(random_batch(seed=9, step=0))  # now the policies differ
    batch = batch_with_silent_groups(1)
    result = engine.train_step(batch)
    assert (result.entropy is not None) == ("entropy_coef" in algorithm)
    pulls = "entropy_coef" in algorithm or "beta" in algorithm
    assert np.isnan(result.logprobs).any() or pulls
    stored = through_the_store(tmp_path / "run", batch, result)
    for name in TrainBatch.__struct_fields__:
        ours, theirs = getattr(stored.batch, name), getattr(batch, name)
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    replayed = replay_loss(stored.batch, stored.logprobs, stored.entropy, config).metrics()
    for name in ("loss", "tokens/trained", "clip_frac", "ess", "mismatch/kl"):
        assert replayed[name] == pytest.approx(result.metrics[name], rel=1e-6, abs=1e-9), name
    assert abs(replayed["loss"] - result.metrics["loss"]) < 1e-7


def test_a_missing_value_that_the_loss_counted_is_an_error_not_a_number() -> None:
    batch = batch_with_silent_groups(0)
    zeros = np.zeros(len(batch.completion_ids), dtype=np.float32)
    unknown = np.full_like(zeros, np.nan)
    with pytest.raises(StoreError, match=r"lacks the trainer's log-prob of \d+ tokens .* step 0"):
        replay_loss(batch, unknown, zeros, tiny_config())
    with pytest.raises(StoreError, match="lacks the trainer's entropy"):
        replay_loss(batch, zeros, unknown, tiny_config(algorithm={"entropy_coef": 0.1}))


def test_a_batch_without_a_token_to_train_has_loss_0() -> None:
    batch = random_batch()
    silent = msgspec.structs.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    unknown = np.full(len(batch.completion_ids), np.nan, dtype=np.float32)
    assert replay_loss(silent, unknown, unknown, tiny_config()).metrics()["loss"] == 0.0


def test_advantages_follow_from_the_stored_rewards() -> None:
    batch = random_batch()
    rewards = np.arange(len(batch.advantages), dtype=np.float64) ** 2
    means = np.bincount(batch.group_index, weights=rewards) / np.bincount(batch.group_index)
    cut = np.zeros(len(rewards), dtype=bool)
    again = advantages_again(batch, rewards, cut, tiny_config())
    np.testing.assert_array_equal(again, (rewards - means[batch.group_index]).astype(np.float32))


def test_advantages_follow_though_a_group_failed_and_the_kl_is_in_the_reward() -> None:
    batch = random_batch(num_groups=2, num_generations=2)
    mask = np.repeat([False, False, True, True], batch.completion_lengths)
    batch = msgspec.structs.replace(batch, loss_mask=mask)
    rewards, cut = np.array([0.0, 0.0, 1.0, 0.0]), np.array([True, False, False, True])
    algorithm = {"beta": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    again = advantages_again(batch, rewards, cut, tiny_config(algorithm=algorithm))
    assert batch.logprobs_reference is not None
    sums = [
        part.sum() for part in split_by_rollout(batch.logprobs - batch.logprobs_reference, batch)
    ]
    half = (1.0 - 0.5 * sums[2] + 0.5 * sums[3]) / 2
    assert again == pytest.approx([0.0, 0.0, half, -half], rel=1e-5)
    # all cut off, and masked for that: advantages of 0 say that it failed
    algorithm = {"advantage": "reinforce_pp", "truncated_completions": "mask"}
    config, cut = tiny_config(algorithm=algorithm), np.array([True, True, False, False])
    batch = msgspec.structs.replace(batch, advantages=np.array([0, 0, 1, -1], np.float32))
    assert advantages_again(batch, rewards, cut, config).tolist() == [0.0, 0.0, 1.0, -1.0]
    sound = msgspec.structs.replace(batch, advantages=np.array([-1, -1, 3, -1], np.float32))
    spread = 3**0.5  # rewards 0 0 1 0: mean 1/4, deviation sqrt(3)/4
    again = advantages_again(sound, rewards, cut, config)
    assert again == pytest.approx([-1 / spread, -1 / spread, 3 / spread, -1 / spread])


def test_advantages_need_the_reference_if_it_was_in_the_reward() -> None:
    algorithm = {"beta": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    batch = random_batch(num_groups=2, num_generations=2)
    rewards, cut = np.zeros(4), np.zeros(4, dtype=bool)
    bare = msgspec.structs.replace(batch, logprobs_reference=None)
    with pytest.raises(StoreError, match="lacks the reference's log-probs of step 0"):
        advantages_again(bare, rewards, cut, tiny_config(algorithm=algorithm))


def test_a_step_that_is_not_stored_is_one_sentence(tmp_path: Path) -> None:
    run = RunDir.create_at(tmp_path / "run")
    run.config.write_text("{}\n")
    with pytest.raises(StoreError, match="holds no rollout that step 7 trained"):
        stored_step(Run(run), 7)
