"""What one optimizer step was computed from, put together again from the rollout store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analysis.export import FileRows, file_rows
from analysis.read_run import Run
from llamarl_hpc.errors import StoreError
from llamarl_hpc.storage.rollout_store.blocks import offsets, ragged_rows
from llamarl_hpc.storage.rollout_store.layout import ENUMS, column_of
from llamarl_hpc.types import Array, TrainBatch

_LENGTH = ENUMS["finish_reason"]["length"]
_TOKENS = (
    "id",
    "logprob_behaviour",
    "loss_mask",
    "logprob_trainer",
    "entropy",
    "logprob_reference",
)
_SCALARS = (
    "rollout_id",
    "group_id",
    "prompt",
    "reward",
    "advantage",
    "temperature",
    "completion_length",
    "finish_reason",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStep:
    """A batch as the trainer got it, and what it made of it. R rollouts, N tokens."""

    batch: TrainBatch
    logprobs: Array  # float32 [N], the trainer's; NaN where a rollout was left out
    entropy: Array  # float32 [N]; NaN where it was not stored
    rollout_ids: Array  # int64 [R]
    rewards: Array  # float64 [R]
    truncated: Array  # bool [R], cut off at the length limit

    @property
    def group_sizes(self) -> list[int]:
        """Completions of each group."""
        sizes: list[int] = np.bincount(self.batch.group_index).tolist()
        return sizes


def trained_steps(run: Run) -> list[int]:
    """Optimizer steps whose rollouts are in the store, of the current lineage."""
    mask = run.group_mask(purpose="train", status="trained")
    steps: list[int] = np.unique(run.table("groups", ["step"], mask)["step"]).tolist()
    return steps


def stored_step(run: Run, step: int) -> StoredStep:
    """The batch of an optimizer step (from 0). Raises StoreError when the store has none."""
    parts = list(_parts(run, step))
    if not parts:
        raise StoreError(f"the store of {run.dir.path} holds no rollout that step {step} trained")
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    lengths = rows["completion_length"]
    # Groups in the order of their numbers, as they were taken; a flush may have cut a step.
    order = np.argsort(rows["group_id"], kind="stable")
    tokens = ragged_rows(offsets(lengths)[order], lengths[order])
    ids, first, group_index = np.unique(
        rows["group_id"][order], return_index=True, return_inverse=True
    )
    reference = rows["logprob_reference"][tokens]
    prompts = rows["prompt_ids"][order][first]
    batch = TrainBatch(
        step=step,
        temperature=float(rows["temperature"][0]),
        prompt_ids=np.concatenate(prompts.tolist()),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        group_index=group_index.reshape(len(order)).astype(np.int32),
        completion_ids=rows["id"][tokens],
        completion_lengths=lengths[order],
        logprobs=rows["logprob_behaviour"][tokens],
        loss_mask=rows["loss_mask"][tokens].astype(bool),
        advantages=rows["advantage"][order].astype(np.float32),
        logprobs_reference=None if np.isnan(reference).all() else reference,
        lags=rows["lag"][tokens],
    )
    assert len(ids) == len(prompts)
    return StoredStep(
        batch=batch,
        logprobs=rows["logprob_trainer"][tokens],
        entropy=rows["entropy"][tokens],
        rollout_ids=rows["rollout_id"][order],
        rewards=rows["reward"][order],
        truncated=rows["finish_reason"][order] == _LENGTH,
    )


def _parts(run: Run, step: int) -> Iterator[dict[str, Array]]:
    """Columns of the step's rollouts [R] and of their tokens [N], file by file."""
    for rows in file_rows(run, purpose="train", status="trained", steps=(step, step)):
        columns = {name: rows.column(f"rollouts/{name}") for name in _SCALARS}
        starts = rows.column("rollouts/token_offset")
        wanted = ragged_rows(starts, columns["completion_length"])
        for name in _TOKENS:
            columns[name] = _within(rows, f"tokens/{name}", wanted)
        columns["lag"] = _lags(rows)
        columns["prompt_ids"] = _prompts(rows, columns["prompt"])
        yield columns


def _within(rows: FileRows, path: str, wanted: Array) -> Array:
    """Some rows of a column; only what lies between the first and the last of them is read."""
    if not len(wanted):
        return np.zeros(0, dtype=column_of(path).dtype)
    first = int(wanted.min())
    values: Array = rows.file.read(path, first, int(wanted.max()) + 1)[wanted - first]
    return values


def _lags(rows: FileRows) -> Array:
    """int32 [N]: the policy version that was trained minus the one that sampled the token."""
    file = rows.file
    groups = rows.column("rollouts/group")
    oldest = rows.column("rollouts/version_min")[groups == groups[0]].min()
    trained = int(file.read("groups/staleness")[groups[0]]) + int(oldest)
    mine = np.isin(file.read("versions/rollout"), rows.rows)
    start, end, version = (file.read(f"versions/{n}")[mine] for n in ("start", "end", "version"))
    return np.repeat(trained - version, end - start).astype(np.int32)


def _prompts(rows: FileRows, prompt: Array) -> Array:
    """Token ids [P] of the prompt of each rollout, an array of arrays [R]."""
    file = rows.file
    start = file.read("prompts/token_offset").tolist()
    length = file.read("prompts/token_length").tolist()
    found = np.empty(len(prompt), dtype=object)
    for index, row in enumerate(prompt.tolist()):
        found[index] = file.read("prompt_tokens/id", start[row], start[row] + length[row])
    return found
