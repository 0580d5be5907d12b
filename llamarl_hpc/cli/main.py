"""The console script `llamarl-hpc`: collects the commands and turns errors into exit codes.

Nothing heavy is imported here: every command imports what it needs when it is called, so that
`--help` and `status` answer at once on a login node.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

import typer

from llamarl_hpc.cli import (
    bench,
    cancel,
    doctor,
    evaluate,
    export,
    logs,
    report,
    rollouts,
    run,
    status,
    submit,
    trace,
    trainer_memory,
)
from llamarl_hpc.errors import EXIT_USER_ERROR, ConfigError, LlamarlError, StoppedBySignal

# What the user can mend; any other error of the system is a fault of ours and keeps its traceback.
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.05

app = typer.Typer(
    name="llamarl-hpc",
    help="Asynchronous RL post-training of LLMs with Slurm, MPI, PyTorch, DeepSpeed and HDF5.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for module in (
    run,
    submit,
    status,
    logs,
    cancel,
    doctor,
    rollouts,
    report,
    trace,
    evaluate,
    export,
    bench,
    trainer_memory,
):
    module.register(app)


class _Signalled(SystemExit):
    """A signal that ends a command, as an exception: whoever has started or written something takes
    it away. Not before that does the command die of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """Once: an impatient second signal must not interrupt the tidying up."""
    for other in _ENDS:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise _Signalled(number)


def _unwind_again(lost: sys.UnraisableHookArgs) -> None:
    """A destructor or a callback, in which the signal came, has swallowed its exception: the signal
    comes once more, when that has returned."""
    number = lost.exc_value.number if isinstance(lost.exc_value, _Signalled) else signal.SIGINT
    if not isinstance(lost.exc_value, _Signalled | KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    signal.signal(number, _unwind)
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def main() -> None:
    """Exit codes: 0 done, 2 user error, 3 an executor failed, 4 stopped and resumable."""
    before = {number: signal.getsignal(number) for number in _ENDS}
    for number in _ENDS:
        if before[number] is not signal.SIG_IGN:  # nohup
            signal.signal(number, _unwind)
    sys.unraisablehook = _unwind_again
    try:
        app()
    except _Signalled as stop:
        signal.signal(stop.number, signal.SIG_DFL)
        os.kill(os.getpid(), stop.number)
    except LlamarlError as error:
        kind = "" if isinstance(error, StoppedBySignal) else "error: "
        text = str(error) if not isinstance(error, ConfigError) else " ".join(str(error).split())
        _end(f"{kind}{text}", error.exit_code)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        what = error.filename or "a file"
        _end(f"error: the file system refused {what}: {error.strerror}", EXIT_USER_ERROR)
    finally:  # for those who call this as a function
        sys.unraisablehook = sys.__unraisablehook__
        for number, handler in before.items():
            # A command that was stopped ignores further signals: the impatient ones that come
            # while the interpreter ends must not change its exit code.
            if signal.getsignal(number) is _unwind and handler is not None:  # None: set in C
                signal.signal(number, handler)


def _end(text: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stderr.write(f"{text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
