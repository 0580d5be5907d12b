"""The long options of sbatch that describe a job (Slurm 22.05 to 25.05)."""

from __future__ import annotations

import difflib

from llamarl_hpc.errors import ConfigError

_NAMES = frozenset(
    {
        "account",
        "acctg-freq",
        "array",
        "batch",
        "bb",
        "bbf",
        "begin",
        "chdir",
        "cluster-constraint",
        "clusters",
        "comment",
        "constraint",
        "container",
        "container-id",
        "contiguous",
        "core-spec",
        "cores-per-socket",
        "cpu-freq",
        "cpus-per-gpu",
        "cpus-per-task",
        "deadline",
        "delay-boot",
        "dependency",
        "distribution",
        "error",
        "exclude",
        "exclusive",
        "export",
        "export-file",
        "extra",
        "extra-node-info",
        "get-user-env",
        "gid",
        "gpu-bind",
        "gpu-freq",
        "gpus",
        "gpus-per-node",
        "gpus-per-socket",
        "gpus-per-task",
        "gres",
        "gres-flags",
        "hint",
        "hold",
        "input",
        "job-name",
        "kill-on-invalid-dep",
        "licenses",
        "mail-type",
        "mail-user",
        "mcs-label",
        "mem",
        "mem-bind",
        "mem-per-cpu",
        "mem-per-gpu",
        "mincpus",
        "network",
        "nice",
        "no-kill",
        "no-requeue",
        "nodefile",
        "nodelist",
        "nodes",
        "ntasks",
        "ntasks-per-core",
        "ntasks-per-gpu",
        "ntasks-per-node",
        "ntasks-per-socket",
        "open-mode",
        "output",
        "overcommit",
        "oversubscribe",
        "partition",
        "power",
        "prefer",
        "priority",
        "profile",
        "propagate",
        "qos",
        "reboot",
        "requeue",
        "reservation",
        "resv-ports",
        "segment",
        "signal",
        "sockets-per-node",
        "spread-job",
        "switches",
        "thread-spec",
        "threads-per-core",
        "time",
        "time-min",
        "tmp",
        "tres-bind",
        "tres-per-task",
        "uid",
        "use-min-nodes",
        "wait-all-nodes",
        "wckey",
    }
)


def is_option(name: str) -> bool:
    """Whether sbatch knows it, written with hyphens or underscores."""
    return name.replace("_", "-") in _NAMES


def check_option(name: str) -> str:
    """The option as sbatch spells it: `mail_type` and `mail-type` are `mail-type`.

    Raises ConfigError with the nearest name that there is.
    """
    spelled = name.strip().removeprefix("--").replace("_", "-")
    if spelled in _NAMES:
        return spelled
    bare = spelled.removeprefix("slurm-")
    near = [bare] if bare in _NAMES else difflib.get_close_matches(bare, _NAMES, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"'{name}' is not an option of sbatch{hint}")
