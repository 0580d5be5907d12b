"""What the rollout store keeps of one prompt group: a plain record, no HDF5 in sight."""

from __future__ import annotations

import msgspec

from llamarl_hpc.types import Array, Completion, Prompt, Purpose, Status


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt group at the moment its fate is known. R = number of its completions.

    `completions` is empty when nothing came back (the replica died, the run stopped); then the
    per-rollout lists are empty too.
    """

    purpose: Purpose
    group_id: int  # dense within purpose; equal in every attempt that issues the same group
    attempt: int  # of the run, from 1
    issue: int  # how often it was handed to a replica, from 1
    prompt: Prompt
    status: Status
    reason: str = ""  # why dropped or abandoned; empty otherwise
    step: int  # optimizer step that consumed it; for evaluation the policy version; else -1
    generator: str = ""  # replica that produced it, "generator.1"
    temperature: float = 1.0
    staleness: int = -1  # trainer version at consumption minus version_min; -1 if not consumed
    completions: list[Completion] = []
    rewards: dict[str, list[float | None]] = {}
    reward: list[float] = []
    advantage: list[float] = []
    logprobs_trainer: list[Array] = []
    loss_mask: list[Array] = []  # bool [T] each; empty: every token if trained, none otherwise
    # float32 [T] each, where the loss used them; empty: not stored
    entropy: list[Array] = []
    logprobs_reference: list[Array] = []
    t_issued: float  # Unix time, seconds
    t_resolved: float
