"""How much memory a trainer rank will hold, from the configuration alone: no torch, no model.

Parameters, gradients and optimizer follow from ZeRO's definition, activations and logits from what
the backward pass of a Llama-like layer keeps. What DeepSpeed holds beside them (buckets, copies for
a reduction, freed blocks that the allocator does not give back) was measured with DeepSpeed 0.19
under the environment of a job step, on CPUs: `llamarl-hpc trainer-memory CONFIG --measure` does it
again. On GPUs nothing has been measured.

    peak of a step   program + parameters + gradients + optimizer + gathered
                     + activations + logits + reduction

Letters: W bytes of the trained parameters in float32, N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llamarl_hpc.config.schema import Config, LoraConfig, TrainerConfig

MIB = 1 << 20
_PROGRAM = 400 * MIB  # Python, torch, DeepSpeed and transformers, loaded and used
_PEFT = 50 * MIB  # loaded for LoRA
_BUCKET = 4 * 50_000_000  # bytes of one reduce or all-gather (training/zero.py)
_ITEM = {"fp32": 4, "bf16": 2}

# Found beside the parts, by stage and dtype: times W; buckets; times W with several ranks.
_REDUCTION: dict[tuple[int, str], tuple[float, float, float]] = {
    (0, "fp32"): (0.0, 0.0, 1.0),
    (0, "bf16"): (0.0, 0.0, 0.2),
    (1, "fp32"): (0.0, 3.1, 1.0),
    (1, "bf16"): (0.5, 0.5, 0.5),
    (2, "fp32"): (1.0, 1.3, 1.5),
    (2, "bf16"): (1.0, 3.1, 0.3),
    (3, "fp32"): (2.8, 2.3, 0.5),
    (3, "bf16"): (3.7, 0.5, 1.5),
}
_OFFLOADED = (0.6, 1.3)  # times W / N, on the way to the host: optimizer, parameters
_HOLES = 1.2  # activations come and go in blocks of all sizes, which leaves holes between them


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Llama-like model, by the names of the trainer's parts."""

    vocabulary: int
    width: int
    inner: int  # of the MLP
    layers: int
    query_width: int  # all heads
    key_width: int  # all heads of keys, or of values
    heads: int
    tied: bool

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face config.json."""
        heads = settings["num_attention_heads"]
        head = settings.get("head_dim") or settings["hidden_size"] // heads
        return cls(
            vocabulary=settings["vocab_size"],
            width=settings["hidden_size"],
            inner=settings["intermediate_size"],
            layers=settings["num_hidden_layers"],
            query_width=heads * head,
            key_width=settings.get("num_key_value_heads", heads) * head,
            heads=heads,
            tied=bool(settings.get("tie_word_embeddings", False)),
        )

    @property
    def num_parameters(self) -> int:
        """Without biases."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        layer = attention + 3 * self.width * self.inner + 2 * self.width
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * layer + tables + self.width

    def num_adapter_parameters(self, lora: LoraConfig) -> int:
        """Of LoRA's corrections; modules that a Llama-like layer lacks count nothing."""
        ends = {
            "q_proj": (self.width, self.query_width),
            "k_proj": (self.width, self.key_width),
            "v_proj": (self.width, self.key_width),
            "o_proj": (self.query_width, self.width),
            "gate_proj": (self.width, self.inner),
            "up_proj": (self.width, self.inner),
            "down_proj": (self.inner, self.width),
        }
        wide = sum(sum(ends[name]) for name in lora.target_modules if name in ends)
        return self.layers * lora.r * wide


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes of the fullest rank."""

    program: int
    parameters: int
    gradients: int
    optimizer: int  # moments, and float32 weights where there are others
    gathered: int  # parameters of all ranks while they are used (ZeRO 3)
    activations: int  # kept for the backward pass
    logits: int  # of one chunk, with its gradient
    reduction: int  # what a reduction and the allocator hold beside the parts
    reference: int  # a frozen policy on the trainer's ranks
    weight_sync: int  # this rank's part of what the generators get
    checkpoint: int  # what a copy that is being written adds

    @property
    def step_peak(self) -> int:
        """Most that is held in an optimizer step, nothing else going on."""
        lasting = self.program + self.parameters + self.gradients + self.optimizer
        return lasting + self.gathered + self.activations + self.logits + self.reduction

    @property
    def peak(self) -> int:
        """A step while a checkpoint is written and weights are sent."""
        return self.step_peak + self.reference + self.weight_sync + self.checkpoint

    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def estimate(model: ModelShape, config: Config, num_ranks: int) -> TrainerMemory:
    """Of a rank among `num_ranks`, at the longest prompts and completions that `config` allows."""
    trainer, lora = config.trainer, config.model.lora
    item, share = _ITEM[trainer.dtype], 1 / num_ranks
    adapters = model.num_adapter_parameters(lora) if lora else 0
    total = (model.num_parameters + adapters) * item
    trained = 4 * (adapters or model.num_parameters)
    pack = Pack.of(config, num_ranks)
    sent = model.num_parameters * item * share
    return TrainerMemory(
        program=_PROGRAM + (_PEFT if lora else 0),
        parameters=_bytes(total * (share if trainer.zero_stage == 3 else 1)),
        gradients=_bytes(_gradients(trainer, trained, num_ranks)),
        optimizer=_bytes(_optimizer(trainer, trained, num_ranks)),
        gathered=total if trainer.zero_stage == 3 and num_ranks > 1 else 0,
        activations=_bytes(_activations(model, config, pack)),
        logits=_logits(model, config, pack),
        reduction=_bytes(_reduction(trainer, trained, num_ranks)),
        reference=model.num_parameters * item if _refers_here(config) else 0,
        weight_sync=_bytes(sent * _copies_sent(config)),
        checkpoint=_bytes(_checkpoint(trainer, trained, num_ranks)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """The largest micro-batch of rows that are all as long as they may be (batching/packing.py)."""

    rows: int
    row_tokens: int
    completion_tokens: int  # of all rows
    is_shared: bool  # several completions in a row, under an attention mask

    @classmethod
    def of(cls, config: Config, num_ranks: int) -> Pack:
        rollout, trainer = config.rollout, config.trainer
        prompt, completion = rollout.max_prompt_length, rollout.max_completion_length
        in_row = 1
        if trainer.share_prompt:
            fitting = (trainer.micro_batch_tokens - prompt) // max(completion - 1, 1)
            in_row = min(rollout.num_generations, max(fitting, 1))
        row = prompt + in_row * (completion - 1)  # without last tokens, which are targets only
        groups = -(-rollout.prompts_per_step // num_ranks)  # of the rank with most
        rows = min(
            max(trainer.micro_batch_tokens // row, 1), groups * (rollout.num_generations // in_row)
        )
        return cls(
            rows=rows,
            row_tokens=row,
            completion_tokens=rows * in_row * completion,
            is_shared=in_row > 1,
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens


# ---------------------------------------------------------------- the parts


def _gradients(trainer: TrainerConfig, trained: int, num_ranks: int) -> float:
    """Stage 1 in bf16 adds micro-batches up in float32, beside what backward makes in bf16."""
    own = trained * (1.0 if trainer.dtype == "fp32" else 1.5)
    return own if trainer.zero_stage < 2 else trained / num_ranks


def _optimizer(trainer: TrainerConfig, trained: int, num_ranks: int) -> float:
    if trainer.zero_stage == 0:
        return trained * (2 if trainer.dtype == "fp32" else 3)
    return 3 * trained / num_ranks


def _reduction(trainer: TrainerConfig, trained: int, num_ranks: int) -> float:
    whole, buckets, together = _REDUCTION[trainer.zero_stage, trainer.dtype]
    whole += together if num_ranks > 1 else 0.0
    on_the_way = _OFFLOADED[0] * trainer.offload_optimizer
    on_the_way += _OFFLOADED[1] * trainer.offload_parameters
    offloaded = on_the_way * trained / num_ranks
    return whole * trained + buckets * min(trained, _BUCKET) + offloaded


def _checkpoint(trainer: TrainerConfig, trained: int, num_ranks: int) -> float:
    """Weights and moments; half of them find room in what a step of stage 3 has freed."""
    if not trainer.save_in_background:
        return 0.0
    return (1.5 if trainer.zero_stage == 3 else 3.0) * trained / num_ranks


def _activations(model: ModelShape, config: Config, pack: Pack) -> float:
    """What autograd keeps of each token and layer: the inputs of both norms, before and after
    scaling; queries, keys and values as attention takes them, and its output; the MLP's two inner
    vectors, the activated one and their product. With LoRA, what only the gradient of a frozen
    weight needs is not kept. But it is freed between blocks that are, where nothing of its size
    fits again, so it counts all the same; the adapters' inner vectors are kept beside it."""
    item, lora = _ITEM[config.trainer.dtype], config.model.lora
    norms = 2 * model.width * (3 * item if item == 4 else 3 * item + 4)
    layer = norms + item * (5 * model.query_width + 4 * model.inner)
    layer += item * lora.r * len(lora.target_modules) if lora else 0
    masks = 0.0
    if config.model.attn_implementation == "eager":
        masks = 3 * item * model.heads * pack.row_tokens
    elif pack.is_shared:
        masks = item * pack.row_tokens
    layer_bytes = _HOLES * pack.tokens * (layer + masks)
    if config.trainer.gradient_checkpointing:
        return pack.tokens * model.width * item * model.layers + layer_bytes
    return model.layers * layer_bytes


def _logits(model: ModelShape, config: Config, pack: Pack) -> int:
    trainer = config.trainer
    chunk = min(trainer.logprob_chunk_tokens, pack.completion_tokens)
    low = 0 if trainer.dtype == "fp32" else 2  # logits as the head makes them
    of_head = model.vocabulary * model.width * _ITEM[trainer.dtype]
    return chunk * model.vocabulary * (8 + low) + (0 if config.model.lora else of_head)


def _refers_here(config: Config) -> bool:
    return config.algorithm.beta > 0.0 and config.reference.placement == "trainer"


def _copies_sent(config: Config) -> int:
    """Two slots in shared memory; one staging copy, or two to find what has changed, else."""
    if config.weight_sync.transport == "collective" and config.weight_sync.delta == "off":
        return 1
    return 2


def _bytes(value: float) -> int:
    return round(value)
