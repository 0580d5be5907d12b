"""Slurm's notations: what sites and versions print, and what users write."""

from __future__ import annotations

import pytest

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.slurm_text.cpu_counts import expand_counts
from llamarl_hpc.slurm_text.gres import count_gpus
from llamarl_hpc.slurm_text.job_id import JobId, parse_job_id
from llamarl_hpc.slurm_text.job_state import (
    component_states,
    is_final,
    overall_state,
    parse_state,
)
from llamarl_hpc.slurm_text.memory import Memory, format_memory, parse_memory
from llamarl_hpc.slurm_text.node_list import expand_nodes
from llamarl_hpc.slurm_text.sbatch_answer import Submitted, parse_submission
from llamarl_hpc.slurm_text.time_limit import format_time, parse_time

# ------------------------------------------------------------------ node lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", "login"),
        ("node[001-003,007]", "node001 node002 node003 node007"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("n[8-10]-ib", "n8-ib n9-ib n10-ib"),
        ("a,b[01-02]-x[1-2],c", "a b01-x1 b01-x2 b02-x1 b02-x2 c"),
        ("n[098-101]", "n098 n099 n100 n101"),
        (" a , b[1] ", "a b1"),
    ],
)
def test_node_lists_keep_order_and_leading_zeros(text: str, names: str) -> None:
    assert expand_nodes(text) == names.split()


@pytest.mark.parametrize(
    ("text", "position"),
    [("n[3-1]", 3), ("n[1-", 5), ("a,,b", 3), ("n]1", 2), ("n[[1]]", 3), ("n[1,x]", 5), ("a,", 3)],
)
def test_a_malformed_node_list_names_the_position(text: str, position: int) -> None:
    with pytest.raises(ConfigError, match=rf"position {position}\)"):
        expand_nodes(text)


def test_an_empty_node_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="empty"):
        expand_nodes("")


def test_counts_per_node_are_expanded() -> None:
    assert expand_counts("72(x2),36") == [72, 72, 36]
    with pytest.raises(ConfigError, match="counts"):
        expand_counts("72x2")


# ------------------------------------------------------------------ times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("30:00", 1800),
        ("1:30:00", 5400),
        ("1-0", 86_400),
        ("2-12:30", 217_800),
        ("1-01:00:05", 90_005),
        ("00:00:30", 30),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_time_limits_in_every_form(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["1:2:3:4", "-5", "1d", "", "1-", "4h"])
def test_other_texts_are_no_time_limit(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time limit"):
        parse_time(text)


def test_times_are_written_with_days_and_rounded_up_to_minutes() -> None:
    assert format_time(90_000) == "1-01:00:00"
    assert format_time(61) == "0-00:02:00"
    assert parse_time(format_time(5400)) == 5400


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("text", "mib", "per"),
    [
        ("64G", 65_536, ""),
        ("1.5g", 1536, ""),
        ("2000", 2000, ""),
        ("4Gn", 4096, "node"),
        ("2000Mc", 2000, "cpu"),
        ("16 GB", 16_384, ""),
        ("1T", 1 << 20, ""),
        ("0", 0, ""),
    ],
)
def test_memory_in_every_form(text: str, mib: float, per: str) -> None:
    memory = parse_memory(text)
    assert memory is not None and (memory.mib, memory.per) == (mib, per)


def test_unknown_memory_is_none_and_nonsense_is_an_error() -> None:
    assert parse_memory("?") is None and parse_memory("") is None
    with pytest.raises(ConfigError, match="memory"):
        parse_memory("much")


def test_memory_is_rounded_up_and_never_becomes_the_whole_node() -> None:
    half_a_mib = parse_memory("512K")
    assert half_a_mib is not None and format_memory(half_a_mib) == "1M"
    assert format_memory(Memory(mib=1536.0)) == "1536M"


# ------------------------------------------------------------------ GPUs


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:a100:4", 8),
        ("gpu:4", 8),
        ("gpu", 2),
        ("gres/gpu:a100=4", 4),
        ("gres/gpu=4,gres/gpu:a100=4", 4),
        ("cpu=8,mem=10G,gres/gpu:a100=1,gres/gpu:h100=2", 3),
        ("gpu:a100:2(S:0-1)", 4),
        ("gpu:a100:2(IDX:0,3)", 4),
        ("gpu:1,nvme:1", 2),
        ("nvme:1", 0),
        ("(null)", 0),
        ("gpu:h100_80gb:8", 16),
    ],
)
def test_gpus_of_a_job_on_two_nodes(text: str, gpus: int) -> None:
    assert count_gpus(text, nodes=2) == gpus


def test_a_gpu_type_with_a_colon_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="gpu:v100:2"):
        count_gpus("gpu:tesla:v100:2", nodes=2)


# ------------------------------------------------------------------ ids and states


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("700", JobId(job="700")),
        ("700+1", JobId(job="700", component=1)),
        ("700+1.0", JobId(job="700", component=1, step="0")),
        ("700+0.batch", JobId(job="700", component=0, step="batch")),
        ("7_3", JobId(job="7", array="3")),
        ("7_[1-5%2]", JobId(job="7", array="[1-5%2]")),
        ("7_3.extern", JobId(job="7", array="3", step="extern")),
    ],
)
def test_job_ids_in_every_form(text: str, parsed: JobId) -> None:
    assert parse_job_id(text) == parsed


@pytest.mark.parametrize("text", ["JobID", "------", "", "700+", "x12"])
def test_other_texts_are_no_job_id(text: str) -> None:
    assert parse_job_id(text) is None


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1001", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"),
        ("NODE_FAIL", "NODE_FAIL"),
        ("COMPLETED", "COMPLETED"),
        ("COMPL+", "COMPL"),  # COMPLETED or COMPLETING: not decided
        ("", "UNKNOWN"),
        ("NEW_IN_2030", "NEW_IN_2030"),
    ],
)
def test_states_are_read_by_their_first_word(text: str, state: str) -> None:
    assert parse_state(text) == state


def test_only_final_states_are_an_end() -> None:
    going_on = ["SIGNALING", "COMPLETING", "REQUEUED", "PENDING", "NEW_IN_2030", "UNKNOWN"]
    assert [state for state in going_on if is_final(state)] == []
    assert is_final("CANCELLED") and is_final("COMPLETED")


def test_components_are_told_apart_and_the_worst_decides() -> None:
    rows = [
        ("700+0", "RUNNING"),
        ("700+1", "FAILED"),
        ("700+1.0", "FAILED"),
        ("700+2", "PENDING"),
        ("700+0.extern", "RUNNING"),
    ]
    states = component_states(rows)
    assert states == {"700": {0: "RUNNING", 1: "FAILED", 2: "PENDING"}}
    assert overall_state(states["700"].values()) == "FAILED"


def test_a_step_that_was_cancelled_says_nothing_about_its_job() -> None:
    states = component_states([("12", "COMPLETED"), ("12.1", "CANCELLED by 0")])
    assert overall_state(states["12"].values()) == "COMPLETED"


@pytest.mark.parametrize(
    ("states", "overall"),
    [
        (["RUNNING", "RUNNING"], "RUNNING"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["PENDING", "REQUEUED"], "REQUEUED"),
        (["COMPLETED", "CANCELLED", "TIMEOUT"], "TIMEOUT"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        ([], "UNKNOWN"),
    ],
)
def test_one_state_for_all_components(states: list[str], overall: str) -> None:
    assert overall_state(states) == overall


# ------------------------------------------------------------------ sbatch


@pytest.mark.parametrize(
    ("stdout", "stderr", "job", "cluster"),
    [
        ("123\n", "", "123", ""),
        ("123;tiger\n", "", "123", "tiger"),
        ("Welcome! job 3 queue is full\n123\n", "", "123", ""),
        ("123\n", "sbatch: warning: 456\n", "123", ""),
    ],
)
def test_the_id_is_the_last_line_that_is_nothing_else(
    stdout: str, stderr: str, job: str, cluster: str
) -> None:
    assert parse_submission(stdout, stderr, 0) == Submitted(job=job, cluster=cluster)


def test_an_answer_without_an_id_is_an_error_that_shows_it() -> None:
    with pytest.raises(ConfigError, match="no job id; it said: nothing"):
        parse_submission("", "", 0)
    with pytest.raises(ConfigError, match=r"refused .*exit code 1.*invalid partition"):
        parse_submission("123\n", "error: invalid partition\n", 1)
