"""Records of prompt groups with every column filled in, reproducible by group id."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from llamarl_hpc.storage.records import GroupRecord
from llamarl_hpc.types import Completion, FinishReason, Prompt, Purpose, Status, VersionSpan


def make_completion(rng: np.random.Generator, version: int, length: int) -> Completion:
    cut = length // 2
    spans = [VersionSpan(0, length, version)]
    if cut and version:
        spans = [VersionSpan(0, cut, version - 1), VersionSpan(cut, length, version)]
    return Completion(
        token_ids=rng.integers(0, 512, length).astype(np.int32),
        logprobs=-rng.exponential(1.0, length).astype(np.float32),
        versions=spans,
        finish_reason=FinishReason.STOP if length % 2 else FinishReason.LENGTH,
        text=f"antwort \u00e9 {length} \u4e16" * (length % 3),
        t_start=1e9 + version,
        t_end=1e9 + version + 0.5,
    )


def make_record(group_id: int, *, num: int = 4, **changes: Any) -> GroupRecord:
    """A trained group of step group_id // 4; `changes` replace fields."""
    rng = np.random.default_rng(group_id)
    step = group_id // 4
    completions = [
        make_completion(rng, max(step - 1, 0), 1 + (group_id + i) % 40) for i in range(num)
    ]
    fields: dict[str, Any] = {
        "purpose": Purpose.TRAIN,
        "group_id": group_id,
        "attempt": 1,
        "issue": 1,
        "prompt": Prompt(
            prompt_id=f"prompt-{group_id % 10}",
            epoch=group_id // 10,
            text=f"What is {group_id} + 1?\n",
            token_ids=np.arange(group_id % 7 + 1, dtype=np.int32),
            columns={"question": f"{group_id} + 1", "answer": f"{group_id + 1}"},
        ),
        "status": Status.TRAINED,
        "step": step,
        "generator": f"generator.{group_id % 2}",
        "temperature": 0.7,
        "staleness": step - min(c.version_min for c in completions) if completions else -1,
        "completions": completions,
        "rewards": {
            "math_answer": [float(i % 2) for i in range(num)],
            "length/penalty": [None if i == 0 else -0.25 for i in range(num)],
        },
        "reward": [float(i % 2) - 0.25 for i in range(num)],
        "advantage": [float(i % 2) - 0.5 for i in range(num)],
        "logprobs_trainer": [c.logprobs + np.float32(0.125) for c in completions],
        "t_issued": 1e9 + step,
        "t_resolved": 1e9 + step + 2,
    }
    return GroupRecord(**(fields | changes))


def with_reference(group_id: int) -> GroupRecord:
    """A record of a run with an entropy bonus and a reference policy: all optional columns."""
    record = make_record(group_id)
    lengths = [len(c.token_ids) for c in record.completions]
    return msgspec.structs.replace(
        record,
        entropy=[np.arange(n, dtype=np.float32) / 8 for n in lengths],
        logprobs_reference=[-np.arange(n, dtype=np.float32) / 16 for n in lengths],
    )
