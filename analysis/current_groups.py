"""Which rows of the rollout store count when a run was resumed (see `lineage.py`): a group that was
trained once is seen once. A pure function of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.lineage import NEVER, Attempt, first_lost_step
from llamarl_hpc.storage.rollout_store.layout import ENUMS, Block
from llamarl_hpc.types import Array

EVAL = ENUMS["purpose"]["eval"]
TRAINED = ENUMS["status"]["trained"]


def current_groups(groups: Block, attempts: Sequence[Attempt]) -> Array:
    """bool [G]: rows that say what became of their group, as the run stands now.

    `groups` holds the columns purpose, group_id, attempt, issue, status, step, t_resolved [G].
    A group that was trained twice within the lineage keeps both rows: that is a fault, and the
    accounting must see it.
    """
    lost = first_lost_step(attempts)
    numbers = groups["attempt"]
    limit = np.full(len(numbers), NEVER, dtype=np.int64)
    for number in np.unique(numbers):
        limit[numbers == number] = lost.get(int(number), NEVER)
    # Step s makes version s + 1; an evaluation of version s, from which a resume started, counts.
    evaluated = groups["purpose"] == EVAL
    valid = groups["step"] < np.where(evaluated & (limit < NEVER), limit + 1, limit)
    trained = valid & (groups["status"] == TRAINED)
    keys = [
        groups["purpose"],
        groups["group_id"],
        np.where(evaluated, groups["step"], -1),
    ]
    order = np.lexsort(
        (groups["t_resolved"], groups["issue"], numbers, trained, valid, *reversed(keys))
    )
    sorted_keys = np.stack([key[order] for key in keys])
    is_last = np.ones(len(order), dtype=bool)
    is_last[:-1] = (sorted_keys[:, 1:] != sorted_keys[:, :-1]).any(axis=0)
    current = np.zeros(len(order), dtype=bool)
    current[order] = is_last
    result: Array = (current | trained) & valid
    return result
