"""The optimizer step and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from llamarl_hpc.config.blocks.base import Block

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


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
    offload_optimizer: bool = Field(
        False,
        description="Keep float32 weights and moments in host memory and make the step there "
        "(ZeRO stages 1 to 3).",
    )
    offload_parameters: bool = Field(
        False,
        description="Keep the sharded parameters in host memory while they are not needed (ZeRO "
        "stage 3).",
    )
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
    peak_tflops: PositiveFloat | None = Field(
        None,
        description="What the device of a rank can do in `dtype`, in TFLOP/s without sparsity "
        "(A100 in bf16: 312, H100: 989); with it `perf/mfu` is logged.",
    )
    max_steps: PositiveInt = Field(100, description="Optimizer steps of the run.")
    save_steps: NonNegativeInt = Field(
        20, description="Checkpoint every so many steps and at the end; 0: only at the end."
    )
    save_in_background: bool = Field(
        True,
        description="The step after a checkpoint waits for a copy in memory only (12 bytes a "
        "trained parameter, over all ranks); false: until it is on disk.",
    )
    save_total_limit: PositiveInt = Field(2, description="Complete checkpoints that are kept.")
    save_best: bool = Field(
        False,
        description="Also keep the checkpoint with the highest held-out accuracy; one is made at "
        "every evaluation.",
    )
    eval_steps: NonNegativeInt = Field(
        0, description="Evaluate every so many steps; 0: only at start and end."
    )
    deterministic: bool = Field(
        True,
        description="Deterministic kernels where torch has them, and repeatable sums of MKL and "
        "cuBLAS (`MKL_CBWR`, `CUBLAS_WORKSPACE_CONFIG`).",
    )


class EvaluationConfig(Block):
    """Held-out accuracy, measured by the generators with the current weights."""

    num_prompts: NonNegativeInt = Field(128, description="Held-out questions; 0: no evaluation.")
    seed: NonNegativeInt = Field(90_001, description="Seed of generated held-out questions.")
    at_start: bool = Field(True, description="Also before the first step.")
    at_end: bool = Field(True, description="Also after the last step.")
    temperature: NonNegativeFloat = Field(0.0, description="0: greedy.")
    num_generations: PositiveInt = Field(1, description="Completions per question (avg@k).")
