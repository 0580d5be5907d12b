"""Every error a person can meet, each with its exit code.

A message is one sentence: what was wanted, what was found, what to do. `ConfigError` is for what
the user can mend (no traceback is shown); our own mistakes are plain assertions.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USER_ERROR = 2  # bad config, missing file, full disk, ...; nothing was lost
EXIT_EXECUTOR_FAILED = 3  # an executor died and could not be replaced, or an alarm stopped the run
EXIT_STOPPED = 4  # stopped by a signal or the time limit after a clean checkpoint; resumable


class LlamarlError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: as on the command line, the sentence alone."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(LlamarlError, ValueError):
    """Something the user can fix: a key, a path, a combination, a data row."""

    exit_code = EXIT_USER_ERROR


class RunDirError(ConfigError):
    """A run folder that is missing, in use, or not what it should be."""


class StoreError(LlamarlError, OSError):
    """A rollout segment or checkpoint that cannot be written or read: a full disk, a damaged file.

    What was complete before is untouched; once the disk is in order the run can be resumed.
    """

    exit_code = EXIT_USER_ERROR


class ChannelError(LlamarlError, RuntimeError):
    """A message that is malformed, too large, or from the wrong side; or a peer that is gone."""

    exit_code = EXIT_EXECUTOR_FAILED


class NotConnectedError(ChannelError):
    """Nobody is there to take the message: no Hello yet, or gone."""


class WeightSyncError(LlamarlError, RuntimeError):
    """Weights that did not arrive whole: wrong version, checksum or layout."""

    exit_code = EXIT_EXECUTOR_FAILED


class ExecutorFailed(LlamarlError, RuntimeError):
    """An executor died or reported an exception.

    `executor`, `rank`, `host` name the process; `detail` holds its traceback or the last lines
    of its log.
    """

    exit_code = EXIT_EXECUTOR_FAILED

    def __init__(self, executor: str, rank: int, host: str, reason: str, detail: str = "") -> None:
        super().__init__(executor, rank, host, reason, detail)  # keeps the error picklable
        self.executor, self.rank, self.host = executor, rank, host
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        head = f"{self.executor} rank {self.rank} on {self.host}: {self.reason}"
        return f"{head}\n{self.detail}" if self.detail else head


class StoppedByAlarm(LlamarlError, RuntimeError):
    """An alarm of the config ended the run; its newest checkpoint is of the last good state."""

    exit_code = EXIT_EXECUTOR_FAILED


class StoppedBySignal(LlamarlError, RuntimeError):
    """The run was asked to stop (Ctrl-C, SIGTERM, time limit) and did so after a checkpoint."""

    exit_code = EXIT_STOPPED


class Continued(StoppedBySignal):
    """The attempt is over, and Slurm will start the next one by itself."""

    exit_code = EXIT_OK


class NoProgress(LlamarlError, RuntimeError):
    """Attempt after attempt ended without getting further: the run is not continued any more."""

    exit_code = EXIT_EXECUTOR_FAILED
