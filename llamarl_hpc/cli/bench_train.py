"""What an optimizer step costs here, against TRL's GRPOTrainer on the same rollouts.

Each side is a process of its own with the same model (float32), the same tokens, the same number
of threads and the environment of a job step (TRL without its allocator settings, if wanted). They
are told to make one step in turn, round by round, and never work at the same time; ratios are taken
within a round, so that others on the machine hurt all sides alike.

    trl             forward, loss, backward, clipping, AdamW; no generation, and (on policy) no
                    pass for old log-probs
    ours            `TrainerEngine.train_step` with nothing skipped
    ours_skipping   the same with `trainer.skip_zero_advantage`

Gradient norms are compared, too: all sides must have done the same work.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from multiprocessing import Pipe
from typing import Any

import msgspec

from llamarl_hpc.config.schema import Config
from llamarl_hpc.controller.supervisor import kill_all
from llamarl_hpc.errors import ConfigError, LlamarlError
from llamarl_hpc.launch.children import start
from llamarl_hpc.launch.steps import step_environment
from llamarl_hpc.models.load import CONFIG, context_length, read_json, resolve_model
from llamarl_hpc.training.bench.task import SIDES, Measured, Ready, Side, Task

_DEADLINE_S = 1800.0  # for loading the model and a first step, and for each further one
_SAME = 1e-3  # relative difference of gradient norms: another order of sums in float32

MISSING = (
    "trl is not installed, so our side was measured alone; to compare: pip install trl==1.16.0"
)

Rounds = list[dict[Side, Measured]]


def make_task(model: str, *, threads: int, trl_rows: int, **numbers: Any) -> Task:
    """The task of these options; `threads` and `trl_rows` 0 mean all. Raises ConfigError."""
    folder = resolve_model(model)
    settings = read_json(folder / CONFIG)
    rows, length = (
        numbers["prompts"] * numbers["completions"],
        numbers["prompt_tokens"] + numbers["completion_tokens"],
    )
    if length > context_length(folder):
        raise ConfigError(
            f"--prompt-tokens and --tokens are {length} together, but the model attends to "
            f"{context_length(folder)} at most; take fewer"
        )
    if trl_rows and (rows % trl_rows or trl_rows > rows):
        raise ConfigError(
            f"--trl-rows is {trl_rows}, which does not divide the {rows} completions of a step; "
            "take a divisor"
        )
    return Task(
        side="ours",
        model=str(folder),
        vocabulary=settings["vocab_size"],
        threads=threads or len(os.sched_getaffinity(0)),
        trl_rows=trl_rows or rows,
        pipe=0,
        **numbers,
    )


def measure(task: Task, num_rounds: int) -> dict[str, Any]:
    """All figures, ready for JSON; without TRL those of our side alone. Raises ConfigError when a
    process cannot do it, LlamarlError when the sides have not done the same."""
    sides = [side for side in SIDES if side != "trl" or find_spec("trl") is not None]
    started: dict[Side, _Process] = {}
    try:
        for side in sides:
            started[side] = _Process(task, side)
        for process in started.values():
            process.wait_until_ready()
        rounds = [
            {side: process.step() for side, process in started.items()} for _ in range(num_rounds)
        ]
        imports = {side: process.imports_bytes for side, process in started.items()}
    except BaseException:  # a signal, too: nobody waits for what they are at
        for process in started.values():
            process.kill()
        raise
    finally:
        for process in started.values():
            process.close()
    check_same_work(rounds)
    return figures(task, rounds, imports)


def figures(task: Task, rounds: Rounds, imports: dict[Side, int]) -> dict[str, Any]:
    """Medians over the rounds. `vs_trl` is how many times faster, `memory_share` our peak over
    TRL's; None without TRL."""
    has_trl = "trl" in imports

    def faster(side: Side) -> float | None:
        if not has_trl:
            return None
        return statistics.median(r["trl"].seconds / r[side].seconds for r in rounds)

    def cheaper(side: Side) -> float | None:
        return (
            statistics.median(r["trl"].cpu_s / r[side].cpu_s for r in rounds) if has_trl else None
        )

    def share(side: Side) -> float | None:
        if not has_trl:
            return None
        return rounds[-1][side].peak_bytes / rounds[-1]["trl"].peak_bytes

    result: dict[str, Any] = {
        "vs_trl": faster("ours"),
        "vs_trl_skipping": faster("ours_skipping"),
        "vs_trl_cpu": cheaper("ours"),
        "vs_trl_skipping_cpu": cheaper("ours_skipping"),
        "memory_share": share("ours"),
        "memory_share_skipping": share("ours_skipping"),
    }
    for side in imports:
        result[f"{side}_s"] = statistics.median(r[side].seconds for r in rounds)
        result[f"{side}_cpu_s"] = statistics.median(r[side].cpu_s for r in rounds)
        result[f"{side}_peak_mib"] = rounds[-1][side].peak_bytes / 2**20
        result[f"{side}_imports_mib"] = imports[side] / 2**20
        result[f"{side}_grad_norm"] = rounds[-1][side].grad_norm
    settings = msgspec.to_builtins(task)
    del settings["side"], settings["pipe"]
    return result | {
        **settings,
        "learnable_prompts": task.learnable_prompts,
        "rounds": len(rounds),
        "load_1min": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def check_same_work(rounds: Rounds) -> None:
    for measured in rounds:
        norms = {side: one.grad_norm for side, one in measured.items()}
        if max(norms.values()) - min(norms.values()) > _SAME * max(norms.values()):
            raise LlamarlError(
                f"the sides have different gradient norms ({norms}), so they did not do the same "
                "work and their times say nothing; report this with the options you used"
            )


class _Process:
    """One side. It works only between `step` and its answer."""

    imports_bytes = 0

    def __init__(self, task: Task, side: Side) -> None:
        self._side = side
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self._connection, theirs = Pipe()
        told = msgspec.structs.replace(task, side=side, pipe=theirs.fileno())
        words = msgspec.json.encode(told).decode()
        self._process = start(
            [sys.executable, "-m", "llamarl_hpc.training.bench.process", words],
            env=_environment(
                task.threads, as_job_step=not (side == "trl" and task.trl_own_environment)
            ),
            pass_fds=[theirs.fileno()],
            stdout=self._errors,
            stderr=self._errors,
        )
        theirs.close()

    def wait_until_ready(self) -> None:
        ready = self._answer()
        assert isinstance(ready, Ready)
        self.imports_bytes = ready.imports_bytes

    def step(self) -> Measured:
        self._connection.send_bytes(b"go")
        measured = self._answer()
        assert isinstance(measured, Measured)
        return measured

    def _answer(self) -> Ready | Measured:
        try:
            if self._connection.poll(_DEADLINE_S):
                return msgspec.json.decode(self._connection.recv_bytes(), type=Ready | Measured)
        except (EOFError, OSError):
            raise ConfigError(self._death()) from None
        raise ConfigError(
            f"the process of '{self._side}' did not finish a step within {_DEADLINE_S:.0f} s; "
            "take fewer --prompts"
        )

    def _death(self) -> str:
        code = self._process.wait(timeout=60)
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]
        why = "killed, as for want of memory" if code == -9 else f"code {code}: {last}"
        return f"the process of '{self._side}' ended ({why}); take fewer --prompts"

    def kill(self) -> None:
        kill_all([self._process.pid])

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it is loading, or amid a step
            self.kill()
            self._process.wait()
        self._errors.close()


def _environment(threads: int, *, as_job_step: bool) -> dict[str, str]:
    """That of a trainer's job step; or what a program has that is simply started."""
    config = Config.model_validate({"resources": {"trainer": {"cpus_per_task": threads}}})
    environment = step_environment(config, "trainer", base=os.environ)
    if not as_job_step:
        environment = {**os.environ, "OMP_NUM_THREADS": f"{threads}"}
    return environment | {
        # threads that wait for one another sleep: on a busy machine spinning would be measured
        "OMP_WAIT_POLICY": "passive",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
