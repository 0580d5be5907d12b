"""The staleness bound: what admission allows is exactly what consumption can bear."""

import pytest

from llamarl_hpc.batching.staleness import (
    oldest_version_allowed,
    staleness,
    step_of,
    tickets_allowed,
)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("prompts_per_step", [1, 4])
def test_a_ticket_may_start_exactly_on_the_versions_that_keep_the_bound(
    max_staleness: int, prompts_per_step: int
) -> None:
    for ticket in range(40):
        step = step_of(ticket, prompts_per_step=prompts_per_step)
        for version in range(step + 1):
            kept = staleness(trainer_version=step, version_min=version) <= max_staleness
            oldest = oldest_version_allowed(
                ticket, prompts_per_step=prompts_per_step, max_staleness=max_staleness
            )
            assert (version >= oldest) == kept
            below = tickets_allowed(
                version, prompts_per_step=prompts_per_step, max_staleness=max_staleness
            )
            assert (ticket < below) == kept


def test_synchronous_training_admits_one_batch_per_version() -> None:
    assert tickets_allowed(0, prompts_per_step=16, max_staleness=0) == 16
    assert tickets_allowed(5, prompts_per_step=16, max_staleness=0) == 96
    assert tickets_allowed(5, prompts_per_step=16, max_staleness=2) == 128
