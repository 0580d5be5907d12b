"""The configuration: one pydantic model per block (`blocks/`), free of logic; cross-field rules in
`checks.py`.

Every default runs on a laptop. Field descriptions are the text of docs/config.md, which
`make docs` generates from here (a test keeps it current). Names are the field's: TRL's and
Hugging Face's for the algorithm, Slurm's long options for resources.
"""

from __future__ import annotations

from pydantic import Field

from llamarl_hpc.config.blocks.alarms import (
    AlarmsConfig,
)
from llamarl_hpc.config.blocks.algorithm import (
    AlgorithmConfig,
)
from llamarl_hpc.config.blocks.base import (
    Block,
)
from llamarl_hpc.config.blocks.data import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
)
from llamarl_hpc.config.blocks.generator import (
    GeneratorConfig,
    WeightSyncConfig,
)
from llamarl_hpc.config.blocks.launch import (
    ChannelConfig,
    LaunchConfig,
)
from llamarl_hpc.config.blocks.reference import (
    ReferenceConfig,
)
from llamarl_hpc.config.blocks.resources import (
    ResourceConfig,
    ResourcesConfig,
)
from llamarl_hpc.config.blocks.rewards import (
    MathAnswerReward,
    PythonReward,
    RewardConfig,
    RewardPoolConfig,
)
from llamarl_hpc.config.blocks.storage import (
    LoggingConfig,
    StorageConfig,
)
from llamarl_hpc.config.blocks.trainer import (
    EvaluationConfig,
    TrainerConfig,
)

__all__ = [
    "AlarmsConfig",
    "AlgorithmConfig",
    "Block",
    "ChannelConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "LaunchConfig",
    "LoggingConfig",
    "LoraConfig",
    "MathAnswerReward",
    "ModelConfig",
    "PythonReward",
    "ReferenceConfig",
    "ResourceConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RewardPoolConfig",
    "RolloutConfig",
    "StorageConfig",
    "TaskConfig",
    "TrainerConfig",
    "WeightSyncConfig",
]


def _default_rewards() -> list[MathAnswerReward | PythonReward]:
    return [MathAnswerReward()]


class Config(Block):
    """A whole run."""

    name: str = Field("run", description="Name of the run; a folder below `runs_dir`.")
    runs_dir: str = Field("runs", description="Where run folders are made.")
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())
    data: DataConfig = Field(default_factory=lambda: DataConfig())
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig())
    rewards: list[RewardConfig] = Field(
        default_factory=_default_rewards,
        min_length=1,
        description="Components; the reward is their weighted sum.",
    )
    reward_pool: RewardPoolConfig = Field(default_factory=lambda: RewardPoolConfig())
    algorithm: AlgorithmConfig = Field(default_factory=lambda: AlgorithmConfig())
    reference: ReferenceConfig = Field(default_factory=lambda: ReferenceConfig())
    trainer: TrainerConfig = Field(default_factory=lambda: TrainerConfig())
    evaluation: EvaluationConfig = Field(default_factory=lambda: EvaluationConfig())
    generator: GeneratorConfig = Field(default_factory=lambda: GeneratorConfig())
    weight_sync: WeightSyncConfig = Field(default_factory=lambda: WeightSyncConfig())
    storage: StorageConfig = Field(default_factory=lambda: StorageConfig())
    alarms: AlarmsConfig = Field(default_factory=lambda: AlarmsConfig())
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig())
    channels: ChannelConfig = Field(default_factory=lambda: ChannelConfig())
    launch: LaunchConfig = Field(default_factory=lambda: LaunchConfig())
    resources: ResourcesConfig = Field(default_factory=lambda: ResourcesConfig())
