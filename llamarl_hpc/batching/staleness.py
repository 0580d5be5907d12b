"""The staleness bound, kept by admission instead of by dropping.

Every prompt group of a run has a *ticket*: 0, 1, 2, ... in the order of issue. Batches are cut in
ticket order, so optimizer step k consumes exactly the tickets kP .. (k+1)P - 1 (P groups a step),
while the trainer's policy version is k. A group whose first token is sampled by version v is
therefore consumed with

    staleness = ticket // P - v

which is at most S exactly when v >= ticket // P - S. A group may start on a replica only if the
replica's weights satisfy that. Nothing else can make it late: waiting in a queue does not change
the step that consumes it, and a group that is started again (its replica died) starts on weights
that are at least as new.

Cutting in ticket order costs waiting for the slowest group of a batch, which the S batches ahead
hide; in return short completions cannot overtake long ones, so the bound adds no length bias, and
the content of every batch is reproducible.
"""

from __future__ import annotations


def step_of(ticket: int, *, prompts_per_step: int) -> int:
    """The optimizer step that consumes this ticket."""
    return ticket // prompts_per_step


def oldest_version_allowed(ticket: int, *, prompts_per_step: int, max_staleness: int) -> int:
    """Oldest policy version that may sample the first token of this ticket's completions."""
    return max(0, step_of(ticket, prompts_per_step=prompts_per_step) - max_staleness)


def tickets_allowed(version: int, *, prompts_per_step: int, max_staleness: int) -> int:
    """Tickets below this number may start on weights of `version`."""
    return (version + max_staleness + 1) * prompts_per_step


def staleness(*, trainer_version: int, version_min: int) -> int:
    """Optimizer steps between the oldest token of a rollout and its consumption."""
    return trainer_version - version_min
