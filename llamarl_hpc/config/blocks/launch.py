"""How executors are started, and the channels between them and the controller."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

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


class ContainerConfig(Block):
    """A container in which every executor runs. The controller stays outside."""

    image: str | None = Field(None, description="The image; without one there is no container.")
    command: list[str] = Field(
        default_factory=lambda: ["apptainer", "exec", "--bind", "{run_dir}", "{image}"],
        description="Words before the Python command of every rank; `{image}` and `{run_dir}` are "
        "replaced.",
    )
    srun_args: list[str] = Field(
        default_factory=list,
        description="Arguments of srun, where Slurm itself starts the container; replaced alike.",
    )
    python: str = Field("python3", description="Python inside the container.")


class LaunchConfig(Block):
    """How job steps are started."""

    site: str | None = Field(
        None,
        description="Site profile: a name from `sbatch/sites/`, or a path to your own ending in "
        "`.yaml`. It gives values to keys that this config does not set.",
    )

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
        "and write a checkpoint. Slurm may be up to 60 s late; the run also looks at the clock.",
    )
    stop_margin_s: NonNegativeFloat = Field(
        60.0,
        description="In a Slurm job no step begins unless it and a checkpoint, as long as they "
        "took lately, would be over so many seconds before the job's end.",
    )
    poll_s: PositiveFloat = Field(
        30.0, description="Seconds between looks at the job's end, which operators may move."
    )
    requeue: Literal["auto", "requeue", "resubmit", "never"] = Field(
        "auto",
        description="How a batch script goes on after the time limit, preemption or a failure. "
        "`requeue`: the job goes back into the queue. `resubmit`: a new job that waits for its "
        "end. `auto`: the former, or the latter where Slurm refuses it. Where the profile of "
        "`site` says that jobs are not requeued, the default is `resubmit`.",
    )
    max_attempts_without_progress: PositiveInt = Field(
        3,
        description="So many attempts in a row that came to no newer checkpoint end the run.",
    )
    cpu_bind: str | None = Field(
        "cores",
        description="`--cpu-bind` of srun; `null` leaves it to the site. Executors that share "
        "cores are not bound.",
    )
    gpu_bind: str | None = Field(None, description="`--gpu-bind` of srun for ranks with GPUs.")
    modules: list[str] = Field(
        default_factory=list,
        description="Lines of shell before those of `setup`: what a site profile loads.",
    )
    setup: list[str] = Field(
        default_factory=list,
        description="Lines of shell for the batch script, before the run starts: modules, exports.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment of every executor.")
    container: ContainerConfig = Field(default_factory=lambda: ContainerConfig())
    preflight: bool = Field(
        False,
        description="Look at all nodes before executors start (as `llamarl-hpc doctor` does), and "
        "stop within a minute, with exit code 2, when something is broken.",
    )
    preflight_timeout_s: PositiveFloat = Field(
        50.0,
        description="Longest that nodes are looked at; what has not answered by then is broken.",
    )
    max_restarts: NonNegativeInt = Field(
        3,
        description="Times a dead generator replica (or the reward executor) is started again "
        "in one attempt.",
    )
