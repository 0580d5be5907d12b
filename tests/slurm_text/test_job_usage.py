"""Rows of sacct about what jobs took."""

from __future__ import annotations

import pytest

from llamarl_hpc.slurm_text.job_usage import COLUMNS, parse_usage


def row(**values: str) -> str:
    usual = {
        "JobID": "12",
        "Submit": "2026-12-01T01:00:00",
        "Eligible": "2026-12-01T01:10:00",
        "Start": "2026-12-01T01:30:00",
        "End": "Unknown",
        "ElapsedRaw": "90",
        "AllocCPUS": "4",
        "AllocTRES": "billing=4,cpu=4,gres/gpu:a100=2,gres/gpu=2,mem=8G,node=1",
    }
    return "|".join((usual | values)[name] for name in COLUMNS)


def test_a_row_is_an_allocation_with_its_wait_from_when_it_could_have_started() -> None:
    (usage,) = parse_usage(row())
    assert (usage.job, usage.component, usage.cpus, usage.gpus) == ("12", None, 4, 2)
    assert (usage.wait_s, usage.elapsed_s) == (20 * 60.0, 90.0)


@pytest.mark.parametrize(
    ("values", "wait"),
    [
        ({"Eligible": "Unknown"}, 30 * 60.0),
        ({"Start": "Unknown"}, None),
        ({"Start": "None", "Eligible": "", "Submit": ""}, None),
        ({"Start": "2026-12-01T00:59:59"}, 0.0),  # clocks
    ],
)
def test_a_wait_that_is_not_known_is_none(values: dict[str, str], wait: float | None) -> None:
    assert parse_usage(row(**values))[0].wait_s == wait


def test_components_count_and_steps_headers_and_torn_rows_do_not() -> None:
    rows = [
        "|".join(COLUMNS),
        row(JobID="12+0"),
        row(JobID="12+1", AllocTRES="", AllocCPUS=""),
        row(JobID="12+1.0"),
        row(JobID="12.batch"),
        row(JobID="9_3"),
        "13|2026-12-01T01:00:00",
        "",
    ]
    found = parse_usage("\n".join(rows))
    assert [(u.job, u.component, u.gpus, u.cpus) for u in found] == [
        ("12", 0, 2, 4),
        ("12", 1, 0, 0),
    ]
    odd = row(AllocTRES="gres/gpu=many", ElapsedRaw="")
    assert [(u.gpus, u.elapsed_s) for u in parse_usage(odd)] == [(0, 0.0)]
