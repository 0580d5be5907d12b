"""What differs between two runs: configuration, outcome, the same questions, the first odd step."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from analysis.export import file_rows
from analysis.read_run import Run
from analysis.rollout_stats import rollout_stats
from analysis.rollout_view import question
from llamarl_hpc.types import Array

_MAX_PROMPTS = 5  # of each kind that are named


def diff_runs(a: Run, b: Run) -> dict[str, Any]:
    """Figures ready for JSON; pairs are [of a, of b], None where a run has none."""
    return {
        "runs": [str(a.dir.path), str(b.dir.path)],
        "config": config_differences(a.config, b.config),
        "outcome": _outcome(a, b),
        "evaluations": _evaluations(a, b),
        "steps": compare_steps(a, b),
        "prompts": _prompts(a, b),
    }


def config_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    """Dotted keys whose values differ, with both values."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    keys = [*left, *(key for key in right if key not in left)]
    return {k: [left.get(k), right.get(k)] for k in keys if left.get(k) != right.get(k)}


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)] if prefix else []
    found = []
    for key, entry in value.items():
        found += _leaves(entry, f"{prefix}.{key}" if prefix else str(key))
    return found


def _outcome(a: Run, b: Run) -> dict[str, list[float | None]]:
    both = [_figures(run) for run in (a, b)]
    keys = dict.fromkeys([*both[0], *both[1]])
    return {key: [figures.get(key) for figures in both] for key in keys}


def _figures(run: Run) -> dict[str, float]:
    mask = run.group_mask(purpose="train", status="trained")
    names = ["step", "reward", "staleness", "completion_length"]
    rows = run.table("rollouts", names, mask)
    found: dict[str, float] = {
        f"groups {status}": count for status, count in rollout_stats(run)["groups"].items()
    }
    if not len(rows["step"]):
        return found
    steps = int(rows["step"].max()) + 1
    late = rows["step"] >= steps * 3 // 4
    return found | {
        "steps": steps,
        "rollouts trained": len(rows["step"]),
        "tokens trained": int(rows["completion_length"].sum()),
        "reward": float(np.nanmean(rows["reward"])),
        "reward, last quarter": float(np.nanmean(rows["reward"][late])),
        "tokens of a completion": float(rows["completion_length"].mean()),
        "staleness": float(rows["staleness"].mean()),
    }


def _evaluations(a: Run, b: Run) -> list[dict[str, Any]]:
    both = [{e.policy_version: e for e in run.evaluations()} for run in (a, b)]
    found = []
    for version in sorted(both[0].keys() | both[1].keys()):
        pair = [evaluations.get(version) for evaluations in both]
        found.append(
            {
                "policy_version": version,
                "accuracy": [e.accuracy if e else None for e in pair],
                "interval": [list(e.interval) if e else None for e in pair],
            }
        )
    return found


# ---------------------------------------------------------------- tokens


def compare_steps(a: Run, b: Run) -> dict[str, Any]:
    """Up to which optimizer step both runs trained the same tokens in the same groups."""
    both = [_step_digests(run) for run in (a, b)]
    common = sorted(both[0].keys() & both[1].keys())
    odd = [step for step in common if both[0][step] != both[1][step]]
    return {
        "in_both": len(common),
        "equal": len(common) - len(odd),
        "first_different": odd[0] if odd else None,
    }


def _step_digests(run: Run) -> dict[int, str]:
    """Of each trained step: its groups and the token ids of their completions."""
    import xxhash

    parts: dict[int, list[tuple[int, int, bytes]]] = {}
    for rows in file_rows(run, purpose="train", status="trained"):
        ids = rows.file.read("tokens/id")
        names = ("step", "group_id", "rollout_id", "token_offset", "completion_length")
        columns = [rows.column(f"rollouts/{name}").tolist() for name in names]
        for step, group, rollout, at, length in zip(*columns, strict=True):
            digest = xxhash.xxh3_64_digest(ids[at : at + length].tobytes())
            parts.setdefault(step, []).append((group, rollout, digest))
    return {
        step: xxhash.xxh3_64_hexdigest(
            b"".join(b"%d:" % group + digest for group, _, digest in sorted(found))
        )
        for step, found in parts.items()
    }


# ---------------------------------------------------------------- questions


def _prompts(a: Run, b: Run) -> dict[str, Any]:
    """Mean reward by question, over those that both trained or were measured on."""
    both = [_rewards_by_prompt(run) for run in (a, b)]
    common = sorted(both[0].keys() & both[1].keys())
    change = {prompt: both[1][prompt][0] - both[0][prompt][0] for prompt in common}
    order = sorted((p for p in common if not math.isnan(change[p])), key=lambda p: change[p])
    return {
        "num": [len(found) for found in both],
        "in_both": len(common),
        "reward": [_mean([found[p][0] for p in order]) for found in both],
        "worse": [_entry(p, both, change) for p in order[:_MAX_PROMPTS] if change[p] < 0],
        "better": [_entry(p, both, change) for p in order[::-1][:_MAX_PROMPTS] if change[p] > 0],
    }


def _entry(prompt: str, both: list[dict[str, tuple[float, str]]], change: Any) -> dict[str, Any]:
    return {
        "prompt_id": prompt,
        "question": both[0][prompt][1],
        "reward": [found[prompt][0] for found in both],
        "change": change[prompt],
    }


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _rewards_by_prompt(run: Run) -> dict[str, tuple[float, str]]:
    """prompt_id -> (mean reward, question) of trained groups."""
    total: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for rows in file_rows(run, purpose="train", status="trained"):
        prompt, reward = rows.column("rollouts/prompt"), rows.column("rollouts/reward")
        names = [name.decode() for name in rows.file.read("prompts/prompt_id").tolist()]
        first = _first_rows(prompt)
        shown, data = rows.prompts(), rows.data_rows()
        for row, index in first.items():
            if names[row] not in texts:
                columns = json.loads(data[index] or "{}")
                texts[names[row]] = question(run, columns, shown[index])
        for row, value in zip(prompt.tolist(), reward.tolist(), strict=True):
            total.setdefault(names[row], []).append(value)
    return {name: (float(np.mean(values)), texts[name]) for name, values in total.items()}


def _first_rows(values: Array) -> dict[int, int]:
    rows, index = np.unique(values, return_index=True)
    return dict(zip(rows.tolist(), index.tolist(), strict=True))
