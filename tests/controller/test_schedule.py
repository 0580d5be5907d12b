"""Which tickets start where: admission, balance, and what a dead replica gives back."""

from llamarl_hpc.controller.schedule import Replica, Schedule


def schedule(**changes: object) -> Schedule:
    settings: dict[str, object] = {
        "prompts_per_step": 4,
        "num_generations": 2,
        "max_staleness": 1,
        "max_outstanding": 100,
        "next_ticket": 0,
        "end_ticket": 40,
        "replicas": {
            name: Replica(name, version=0, ready=True) for name in ("generator.0", "generator.1")
        },
    }
    return Schedule(**{**settings, **changes})  # type: ignore[arg-type]


def test_only_tickets_within_the_bound_are_issued_and_in_order() -> None:
    plan = schedule()
    assert [ticket for _, ticket in plan.assign()] == list(range(8))
    assert plan.assign() == []
    for replica in plan.replicas.values():
        replica.version = 1
    assert [ticket for _, ticket in plan.assign()] == [8, 9, 10, 11]


def test_with_max_staleness_0_nothing_runs_ahead_of_the_trainer() -> None:
    plan = schedule(max_staleness=0)
    assert [ticket for _, ticket in plan.assign()] == [0, 1, 2, 3]


def test_groups_are_spread_evenly() -> None:
    plan = schedule()
    counts = dict.fromkeys(plan.replicas, 0)
    for name, _ in plan.assign():
        counts[name] += 1
    assert counts == {"generator.0": 4, "generator.1": 4}


def test_a_replica_with_old_weights_gets_nothing_new() -> None:
    plan = schedule(next_ticket=8)
    plan.replicas["generator.1"].version = 1
    assert {name for name, _ in plan.assign()} == {"generator.1"}


def test_a_full_replica_waits() -> None:
    plan = schedule(max_outstanding=3)  # room for one group of two completions each
    assert len(plan.assign()) == 2
    plan.replicas["generator.0"].sequences -= 2
    assert plan.assign() == [("generator.0", 2)]


def test_a_returned_ticket_goes_out_before_new_ones() -> None:
    plan = schedule(max_outstanding=2)
    assert plan.assign() == [("generator.0", 0), ("generator.1", 1)]
    plan.replicas["generator.0"].ready = False
    plan.give_back(0)
    assert plan.assign() == []  # generator.1 is full, the other one is dead
    plan.replicas["generator.1"].sequences = 0
    assert plan.assign() == [("generator.1", 0)]


def test_nothing_is_issued_beyond_the_last_step() -> None:
    plan = schedule(end_ticket=6)
    assert [ticket for _, ticket in plan.assign()] == list(range(6))
    assert plan.is_exhausted


def test_skipped_updates_do_not_starve_the_trainer() -> None:
    # Two batches made no optimizer step: the version stays at 0 while step 2 waits for its batch.
    plan = schedule(next_ticket=8, max_staleness=0, skipped_steps=2)
    assert [ticket for _, ticket in plan.assign()] == [8, 9, 10, 11]


def test_the_first_replica_with_new_weights_leaves_the_others_their_share() -> None:
    plan = schedule(next_ticket=8)
    quick, slow = plan.replicas["generator.0"], plan.replicas["generator.1"]
    quick.version, slow.switching = 1, True
    assert plan.assign() == [("generator.0", 8), ("generator.0", 9)]  # 2 of 4, not all
    assert plan.assign() == []
    slow.version, slow.switching = 1, False
    assert plan.assign() == [("generator.1", 10), ("generator.1", 11)]
