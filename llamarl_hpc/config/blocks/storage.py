"""What is written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class StorageConfig(Block):
    """Rollouts in HDF5."""

    compression: Literal["none", "gzip", "lzf", "zstd", "blosc2"] = Field(
        "gzip",
        description="Filter of closed segments: `gzip` is in every HDF5, `lzf` in every h5py; "
        "`zstd` and `blosc2` need hdf5plugin, to write and to read.",
    )
    segment_rollouts: PositiveInt = Field(
        65_536, description="A segment is closed after so many rollouts,"
    )
    segment_mb: PositiveInt = Field(
        128, description="or so many MiB before compression, or 64 flushes."
    )


class LoggingConfig(Block):
    """What is written besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="Write TensorBoard events (if it is installed).")
    wandb: Literal["off", "offline"] = Field(
        "off",
        description="`offline`: also for Weights & Biases, below `wandb/` of the run folder; "
        "`wandb sync` uploads it from a machine with a network. Needs the package wandb.",
    )
    mlflow: bool = Field(
        False,
        description="Also for MLflow, below `mlflow/` of the run folder (`mlflow ui "
        "--backend-store-uri`). Needs the package mlflow-skinny or mlflow.",
    )
    level: Literal["debug", "info", "warning"] = Field("info", description="Of the log files.")
