"""The pool grades what can be graded, whatever a completion does to its worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamarl_hpc.channels.messages import GroupScores, ScoreItem
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.rewards.pool import RewardPool, check_rewards
from llamarl_hpc.types import Purpose

SOURCE = '''
import os, sys, time

def act(prompts, completions, **columns):
    """Does to its process what each completion says."""
    return [_one(text) for text in completions]

def _one(text):
    if text == "spin":
        while True:
            pass
    if text == "sleep":
        time.sleep(3600)
    if text == "child":
        os.system("sleep 3611")
    if text == "bomb":
        hoard = []
        while True:
            hoard.append(bytearray(2**24))
    if text == "crash":
        os.kill(os.getpid(), 11)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "print":
        print("printed by a reward function")
    return float(len(text))

def columns_back(completions, **columns):
    return [float(columns["level"][i]) + len(columns) for i in range(len(completions))]

def environment(completions, **columns):
    return [float("PMI_RANK" in os.environ), float(os.environ["OMP_NUM_THREADS"])]
'''

MakePool = Callable[..., RewardPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    (tmp_path / "acts.py").write_text(SOURCE)
    pools: list[RewardPool] = []

    def make(*functions: str, rewards: Any = None, **limits: Any) -> RewardPool:
        named = [{"kind": "python", "function": f"{tmp_path}/acts.py:{f}"} for f in functions]
        config = Config.model_validate(
            {"rewards": rewards or named, "reward_pool": {"workers": 1, "timeout_s": 2.0} | limits}
        )
        pools.append(RewardPool(config))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def item(group_id: int, *completions: str, **columns: Any) -> ScoreItem:
    return ScoreItem(
        purpose=Purpose.TRAIN,
        group_id=group_id,
        prompt="p",
        columns={"answer": "4"} | columns,
        completions=list(completions),
    )


def collect(pool: RewardPool, number: int, timeout_s: float = 60.0) -> dict[int, GroupScores]:
    end = time.monotonic() + timeout_s
    done: dict[int, GroupScores] = {}
    while len(done) < number:
        assert time.monotonic() < end, f"only {len(done)} of {number} groups came back"
        done |= {group.group_id: group for group in pool.collect(0.5)}
    return done


def test_groups_come_back_with_components_and_total(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(
        rewards=[
            {"kind": "math_answer", "weight": 1.0},
            {"kind": "python", "function": f"{tmp_path}/acts.py:act", "weight": 0.5},
        ]
    )
    before = time.time()
    pool.submit(item(7, "4", "the answer is 5"))
    (group,) = collect(pool, 1).values()
    assert group.components == {"math_answer": [1.0, 0.0], "act": [1.0, 15.0]}
    assert group.total == [1.5, 7.5]
    assert (group.group_id, group.error, group.reasons) == (7, "", ["", ""])
    assert before <= group.t_start <= group.t_end <= time.time()


def test_columns_arrive_as_lists_and_the_rank_does_not(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    pool = make_pool("columns_back", "environment")
    pool.submit(item(0, "a", "b", level=4))  # beside prompts and answer: three columns
    (group,) = collect(pool, 1).values()
    assert group.components == {"columns_back": [7.0, 7.0], "environment": [0.0, 1.0]}


def test_only_the_completion_that_hangs_loses(make_pool: MakePool) -> None:
    pool = make_pool("act", timeout_s=0.5)
    pool.submit(item(0, "ab", "sleep", "abc"))
    pool.submit(item(1, "abcd"))
    done = collect(pool, 2)
    assert done[0].components == {"act": [2.0, 0.0, 3.0]}
    assert done[0].reasons == ["", "time limit 0.5 s", ""]
    assert done[0].error == "" and done[1].total == [4.0]


def test_memory_and_crashes_cost_one_completion_each(make_pool: MakePool) -> None:
    pool = make_pool("act", memory_mb=256)
    pool.submit(item(0, "bomb", "ab", "crash"))
    (group,) = collect(pool, 1).values()
    assert group.components == {"act": [0.0, 2.0, 0.0]}
    assert group.reasons == ["memory limit 256 MB", "", "the worker crashed (exit code -11)"]
    assert len(pool.worker_pids) == 1


def test_a_function_that_raises_fails_its_whole_group(make_pool: MakePool) -> None:
    pool = make_pool("act")
    pool.submit(item(0, "ab", "raise"))
    pool.submit(item(1, "abc"))
    done = collect(pool, 2)
    assert done[0].total == [0.0, 0.0] and done[0].components == {"act": [0.0, 0.0]}
    assert "reward 'act': KeyError: 'no such thing' (acts.py:" in done[0].error
    assert done[1].total == [3.0] and done[1].error == ""


def test_printing_does_not_disturb_the_answers(make_pool: MakePool) -> None:
    pool = make_pool("act")
    pool.submit(item(0, "print", "print"))
    assert collect(pool, 1)[0].total == [5.0, 5.0]


def test_a_reward_that_cannot_be_built_is_a_config_error_at_the_start(make_pool: MakePool) -> None:
    pool = make_pool("no_such_function", workers=2)
    with pytest.raises(ConfigError, match="has no 'no_such_function'"):
        pool.start()
    assert pool.worker_pids == []


def test_rewards_can_be_checked_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "acts.py").write_text(SOURCE)

    def config(function: str) -> Config:
        return Config.model_validate({"rewards": [{"kind": "python", "function": function}]})

    check_rewards(Config())
    check_rewards(config(f"{tmp_path}/acts.py:act"))
    with pytest.raises(ConfigError, match="has no 'atc'; it has act"):
        check_rewards(config(f"{tmp_path}/acts.py:atc"))
    assert "acts" not in sys.modules and psutil.Process().children() == []


def test_collect_waits_no_longer_than_it_is_told(make_pool: MakePool) -> None:
    pool = make_pool("act", timeout_s=30.0)
    pool.start()
    assert pool.collect(0.0) == []
    pool.submit(item(0, "sleep"))
    start = time.monotonic()
    assert pool.collect(0.2) == []
    assert 0.15 < time.monotonic() - start < 5.0


def test_a_group_without_completions_is_done_at_once(make_pool: MakePool) -> None:
    pool = make_pool("act")
    pool.submit(item(0))
    assert collect(pool, 1)[0].total == []


def test_workers_ignore_sigterm_and_finish_their_batch(make_pool: MakePool) -> None:
    pool = make_pool("act", workers=2)
    pool.start()
    pids = pool.worker_pids
    for number in range(20):
        pool.submit(item(number, "a" * number))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert [group.total for _, group in sorted(collect(pool, 20).items())] == [
        [float(n)] for n in range(20)
    ]
    assert pool.worker_pids == pids


def test_close_leaves_no_process_even_of_what_a_function_started(make_pool: MakePool) -> None:
    pool = make_pool("act", workers=2, timeout_s=60.0)
    pool.submit(item(0, "child"))
    pool.submit(item(1, "spin"))
    deadline = time.monotonic() + 30
    family: list[psutil.Process] = []
    while not any("sleep" in p.name() for p in family):
        assert time.monotonic() < deadline
        pool.collect(0.1)
        family = psutil.Process().children(recursive=True)
    pool.close()
    pool.close()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "acts.py").write_text(SOURCE)
    code = f"""
import sys, time
from llamarl_hpc.config.schema import Config
from llamarl_hpc.rewards.pool import RewardPool
from llamarl_hpc.channels.messages import ScoreItem
from llamarl_hpc.types import Purpose
if __name__ == "__main__":
    rewards = [{{"kind": "python", "function": "{tmp_path}/acts.py:act"}}]
    config = Config.model_validate({{"rewards": rewards, "reward_pool": {{"workers": 2}}}})
    pool = RewardPool(config)
    pool.submit(ScoreItem(purpose=Purpose.TRAIN, group_id=0, prompt="", columns={{}},
                          completions=["spin"]))
    pool.collect(0.5)
    print(*pool.worker_pids, flush=True)
    time.sleep(3600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert alive == []


@pytest.mark.slow
def test_hangs_and_memory_bombs_do_not_stop_the_rest(make_pool: MakePool) -> None:
    """100 items, 20 of them hang, 5 eat memory; from a thread that is not the main one."""
    acts = ["spin"] * 10 + ["sleep"] * 10 + ["bomb"] * 5 + ["good"] * 75
    order = [acts[(i * 37) % 100] for i in range(100)]
    results: dict[int, GroupScores] = {}
    pids: list[int] = []
    seconds = [0.0]

    def work() -> None:
        pool = make_pool("act", workers=4, timeout_s=2.0, memory_mb=512)
        start = time.monotonic()
        for number, act in enumerate(order):
            pool.submit(item(number, act))
        results.update(collect(pool, 100))
        seconds[0] = time.monotonic() - start
        pids.extend(pid for pid in pool.worker_pids if psutil.pid_exists(pid))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=120)
    assert [results[i].total for i in range(100)] == [
        [4.0 if act == "good" else 0.0] for act in order
    ]
    reasons: dict[str, set[str]] = {}
    for number, act in enumerate(order):
        reasons.setdefault(act, set()).add(results[number].reasons[0])
    assert reasons["good"] == {""}
    assert reasons["spin"] == reasons["sleep"] == {"time limit 2 s"}
    assert reasons["bomb"] <= {"memory limit 512 MB", "time limit 2 s"}  # or a busy machine
    assert len(pids) == 4
    assert seconds[0] < 40.0  # 20 x 2 s over 4 workers is 10 s; the rest is room for a busy machine
