"""How executors are started, and the channels between them and the controller."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class ChannelConfig(Block):
    """Messages between controller and executors."""

    interface: str | None = Field(
        None, description="Network interface or IPv4 address to listen on; default: chosen by host."
    )
    heartbeat_s: PositiveFloat = Field(1.0, description="Interval of heartbeats.")
    heartbeat_timeout_s: PositiveFloat = Field(
        60.0, description="An executor silent for so long is taken for dead, and named."
    )
    startup_timeout_s: PositiveFloat = Field(
        600.0, description="Every executor must have said hello by then; the missing are named."
    )
    reply_timeout_s: PositiveFloat = Field(
        3600.0,
        description="An executor that leaves a request unanswered for so long is named and "
        "killed, although its heart beats.",
    )
    max_message_mb: PositiveInt = Field(512, description="Larger messages are refused.")


class LaunchConfig(Block):
    """How job steps are started."""

    launcher: Literal["auto", "mpiexec", "srun"] = Field(
        "auto",
        description="`srun`: every executor is a job step of the Slurm job around the run. "
        "`mpiexec`: all on this machine. `auto`: srun in a batch script or `salloc`, else mpiexec.",
    )
    mpi: str = Field(
        "auto",
        description="`--mpi` of srun, e.g. `pmix`, `pmi2`, `cray_shasta`; `default` leaves it to "
        "the site. `auto`: pmix for Open MPI, pmi2 for MPICH, if srun has it.",
    )
    extra_args: list[str] = Field(
        default_factory=list,
        description="More arguments for mpiexec or srun, whichever starts the executors.",
    )
    signal_delay_s: PositiveInt = Field(
        180,
        description="Seconds before the time limit at which Slurm tells the run to finish its step "
        "and write a checkpoint. Slurm may be up to 60 s late.",
    )
    setup: list[str] = Field(
        default_factory=list,
        description="Lines of shell for the batch script, before the run starts: modules, exports.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment of every executor.")
    max_restarts: NonNegativeInt = Field(
        3,
        description="Times a dead generator replica (or the reward executor) is started again "
        "in one attempt.",
    )
