"""Findings from what ranks report: everything in order, and one broken thing at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from llamarl_hpc.launch.doctor.finding import Finding, as_json, exit_code, fail, ok, warn, worst
from llamarl_hpc.launch.doctor.inside import read_output
from llamarl_hpc.launch.doctor.probe import MARK, Report
from llamarl_hpc.launch.doctor.reports import Expected, Step, judge

ROLES = ("trainer", "generator", "reward")
EXPECTED = {role: Expected(ranks=2, cpus=2, gpus=0, is_real=True) for role in ROLES}


def report(role: str, rank: int, **changes: Any) -> Report:
    values: dict[str, Any] = {
        "host": f"{role}-node",
        "pid": 100 + rank,
        "resolves": True,
        "affinity": [2 * rank, 2 * rank + 1],
        "open_files": 4096,
        "locked_memory": -1,
        "shm_free": 1 << 30,
        "versions": {"python": "3.11.7", "torch": "2.13"},
        "offline": True,
        "is_final": True,
        "size": 2,
        "folder_age_s": 0.1,
        "clock_s": 0.001,
        "speeds": {"controller": 500.0} if rank == 0 else {},
    }
    return Report(role=role, rank=rank, **values | changes)


def steps(**changes: dict[str, Any]) -> dict[str, Step]:
    """Two ranks a role; `changes` are for both ranks of a role."""
    return {
        role: Step(
            reports=[report(role, rank, **changes.get(role, {})) for rank in (0, 1)],
            returncode=0,
            words="",
        )
        for role in ROLES
    }


def found(
    these: Mapping[str, Step], expected: Mapping[str, Expected] = EXPECTED
) -> dict[str, Finding]:
    """Findings by name; of several with one name the worst."""
    by_name: dict[str, Finding] = {}
    for finding in judge(these, expected):
        other = by_name.get(finding.name)
        if other is None or worst([other]) != worst([other, finding]):
            by_name[finding.name] = finding
    return by_name


def test_ranks_that_see_everything_are_in_order() -> None:
    findings = found(steps())
    assert [f.text for f in findings.values() if f.verdict != "ok"] == []
    assert findings["mpi"].figures == {"trainer": 2, "generator": 2, "reward": 2}
    assert findings["network"].figures["mb_per_s"]["trainer-controller"] == 500.0
    assert "no executor asks for GPUs" in findings["gpus"].sentence


@pytest.mark.parametrize(
    ("name", "verdict", "changes", "words"),
    [
        (
            "mpi",
            "fail",
            {"trainer": {"mpi_problem": "started 2 ranks but MPI sees 1 (MPICH 5); do x"}},
            "trainer: started 2 ranks but MPI sees 1 (MPICH 5); set launch.mpi to what",
        ),
        (
            "mpi",
            "fail",
            {"reward": {"is_final": False}},
            "reward: 2 of 2 ranks ended while MPI started",
        ),
        (
            "shared_folder",
            "fail",
            {"generator": {"folder_age_s": None}},
            "generator on generator-node cannot see what the controller writes",
        ),
        (
            "shared_folder",
            "fail",
            {"reward": {"network_problems": {"folder": "cannot be written: Read-only"}}},
            "reward: cannot be written: Read-only; make the run folder writable",
        ),
        ("shared_folder", "warn", {"trainer": {"folder_age_s": 30.0}}, "seen 30.0 s late"),
        (
            "network",
            "fail",
            {"generator": {"network_problems": {"trainer": "10.0.0.1:5: refused"}}},
            "generator on generator-node cannot reach trainer: 10.0.0.1:5: refused; set channels",
        ),
        (
            "network",
            "warn",
            {"generator": {"network_problems": {"reward": "10.0.0.1:5: refused"}}},
            "cannot reach reward",
        ),
        ("network", "warn", {"trainer": {"speeds": {"controller": 3.0}}}, "with 3 MB/s"),
        ("host_names", "warn", {"reward": {"resolves": False}}, "reward-node cannot look up"),
        ("clock", "warn", {"trainer": {"clock_s": -7.0}}, "clock of trainer-node differs by 7.0"),
        ("affinity", "warn", {"trainer": {"affinity": [0]}}, "may use 1 cores but"),
        ("files", "fail", {"trainer": {"missing_files": ["/m/config.json"]}}, "/m/config.json"),
        ("offline", "warn", {"trainer": {"offline": False}}, "HF_HUB_OFFLINE is not 1 for train"),
        ("limits", "warn", {"trainer": {"open_files": 256}}, "may open 256 files"),
        (
            "versions",
            "fail",
            {"reward": {"versions": {"python": "3.11.7", "torch": "2.9"}}},
            "torch differs: trainer 2.13, generator 2.13, reward 2.9",
        ),
    ],
)
def test_one_broken_thing_is_named_with_what_to_do(
    name: str, verdict: str, changes: dict[str, Any], words: str
) -> None:
    finding = found(steps(**changes))[name]
    assert (finding.verdict, words in finding.text) == (verdict, True), finding.text
    assert finding.advice


def test_a_wrong_flag_is_said_once_for_all_roles() -> None:
    wrong = {"mpi_problem": "started 2 ranks but MPI sees 1; x"}
    broken = [f for f in judge(steps(**dict.fromkeys(ROLES, wrong)), EXPECTED) if f.name == "mpi"]
    assert [f.sentence.partition(":")[0] for f in broken] == ["trainer and generator and reward"]


def test_a_step_that_never_started_shows_the_words_of_its_launcher() -> None:
    dead = steps() | {"reward": Step(reports=[], returncode=1, words="srun: error: no such node")}
    finding = found(dead)["steps"]
    assert finding.verdict == "fail"
    assert finding.sentence == (
        "reward: 0 of 2 ranks started (exit code 1: srun: error: no such node)"
    )
    late = steps() | {"reward": Step(reports=[], returncode=None, words="")}
    assert "no end in time" in found(late)["steps"].sentence


def test_ranks_bound_to_the_same_cores_are_named_but_an_unbound_node_is_not() -> None:
    bound = found(steps(trainer={"affinity": [0, 1, 2]}) | {})["affinity"]
    assert bound.verdict == "ok"  # both may use all three: nobody binds there
    half = steps()
    half["trainer"].reports[1].affinity = [1, 2]
    assert "ranks of trainer on trainer-node share 1 cores" in found(half)["affinity"].text
    packed = {**EXPECTED, "trainer": Expected(ranks=2, cpus=1, gpus=0, is_real=True)}
    one_core = found(steps(trainer={"affinity": [0]}), packed)["affinity"]
    assert "share 1 cores; set launch.cpu_bind" in one_core.text
    tried = {**EXPECTED, "trainer": Expected(ranks=2, cpus=1, gpus=0, is_real=False)}
    assert found(steps(trainer={"affinity": [0]}), tried)["affinity"].verdict == "ok"


def test_gpus_and_room_for_weights_are_compared_with_what_is_wanted() -> None:
    wants = {**EXPECTED, "trainer": Expected(ranks=2, cpus=2, gpus=2, is_real=True)}
    problem = {"gpus": [], "gpu_problem": "neither nvidia-smi nor rocm-smi is there"}
    none = found(steps(trainer=problem), wants)["gpus"]
    assert none.verdict == "fail" and "wants 2 GPU(s) but neither nvidia-smi" in none.sentence
    both = found(steps(trainer={"gpus": ["NVIDIA H200, 570.1"] * 2}), wants)
    assert both["gpus"].sentence == "trainer: NVIDIA H200, 570.1"
    locked = found(steps(trainer={"gpus": ["x"] * 2, "locked_memory": 65536}), wants)["limits"]
    assert locked.verdict == "warn" and "may lock 0 MiB" in locked.sentence


def test_clocks_that_differ_do_not_make_a_folder_look_slow() -> None:
    skewed = found(steps(trainer={"folder_age_s": -99.9, "clock_s": 100.0}))
    assert skewed["shared_folder"].verdict == "ok" and skewed["clock"].verdict == "warn"


def test_output_of_ranks_is_read_among_other_words() -> None:
    first, last = report("trainer", 0, is_final=False, size=0), report("trainer", 0)
    other = report("trainer", 1)

    def line(r: Report) -> str:
        return MARK + msgspec.json.encode(r).decode()

    text = "\n".join(["hello", line(first), f"warning {line(other)}", line(last), MARK + "{half"])
    reports, words = read_output(text)
    assert [(r.rank, r.is_final) for r in reports] == [(0, True), (1, True)]
    assert words.splitlines() == ["hello", "warning ", MARK + "{half"]


def test_the_worst_finding_decides() -> None:
    good, odd, bad = ok("a", "x"), warn("b", "y", "do"), fail("c", "z", "mend", figure=1)
    assert [worst(f) for f in ([], [good], [good, odd], [bad, odd])] == ["ok", "ok", "warn", "fail"]
    assert [exit_code(f) for f in ([good, odd], [good, bad])] == [0, 2]
    result = as_json([good, bad], 1.234)
    assert (result["verdict"], result["seconds"]) == ("fail", 1.23)
    assert result["findings"][1] == {
        "name": "c",
        "verdict": "fail",
        "sentence": "z",
        "advice": "mend",
        "figures": {"figure": 1},
    }
