"""Commands that start processes are signalled while these work: all of them go within seconds.

`run` amid its steps is the business of tests/e2e/test_interruptions.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_run import LiveRun, write_run_files

PROBE = "llamarl_hpc.launch.doctor.probe"
# command, and a word in the command line of what it starts: there, it is at work
STARTED = {
    "trainer-memory {config} --measure": "llamarl_hpc.training.memory_probe",
    "bench weight-sync --size custom --rounds 500": "llamarl_hpc.weight_sync.bench.rank",
    "bench train --model {model} --rounds 5000": "llamarl_hpc.training.bench.process",
    "eval {config} --set evaluation.num_prompts=1": "llamarl_hpc.rewards.worker",
    "doctor {config} --set launch.launcher=mpiexec": PROBE,
    "run {config} --run-dir {run} --set launch.preflight=true": PROBE,
}
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def cases() -> Iterator[object]:
    """What takes a while to begin gets one signal here, or none, and the others where long tests
    are run."""
    for command in STARTED:
        for number in SIGNALS:
            slow = command.startswith(("doctor", "run")) and number != signal.SIGTERM
            marks = [pytest.mark.long] if slow or command.startswith("eval") else []
            name = f"{'-'.join(command.split(' {')[0].split()[:2])}-{number.name}"
            yield pytest.param(command, number, id=name, marks=marks)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_run_files(folder)
    (folder / "slow").touch()
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands make their temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.mpi
@pytest.mark.parametrize(("command", "number"), list(cases()))
def test_a_signalled_command_leaves_no_process_and_no_temporary_file(
    command: str, number: signal.Signals, files: Path, temporary: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = command.format(config=files / "config.yaml", model=files / "model", run=run).split()
    live = LiveRun(*words, folder=run)
    try:
        live.wait(STARTED[command], lambda: is_at_work(live, STARTED[command]))
        live.process.send_signal(number)
        live.process.wait(60)
        assert live.orphans(within_s=10) == []
        assert list(temporary.iterdir()) == []
        assert "Traceback" not in live.err
        code = {signal.SIGINT: 130}.get(number, -number)
        assert live.process.returncode == (4 if words[0] == "run" else code), live.err
    finally:
        live.destroy()


DESTRUCTOR = """
import signal, sys, time
from llamarl_hpc.cli import main

class Slow:
    def __del__(self):
        print("in it", flush=True)
        time.sleep(600)

def command():
    Slow()
    time.sleep(600)

main.app = command
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_exception_a_destructor_swallows_still_ends_the_command(
    number: signal.Signals,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DESTRUCTOR],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in it\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -number
    assert "Exception ignored" not in err


IMPATIENT = """
import atexit, os, signal, sys
from llamarl_hpc.cli import main
from llamarl_hpc.controller import signals

def command():
    signals.ignore()
    sys.exit(4)

atexit.register(os.kill, os.getpid(), signal.SIGINT)
main.app = command
main.main()
"""


def test_a_signal_at_the_end_of_a_stopped_run_does_not_change_its_exit_code() -> None:
    process = subprocess.run([sys.executable, "-c", IMPATIENT], capture_output=True, check=False)
    assert (process.returncode, process.stderr) == (4, b"")


def is_at_work(live: LiveRun, word: str) -> bool:
    return any(word in command_line(process) for process in live.processes())


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
