"""How many floating-point operations a pass needs by the definition of the model.

Multiplications and additions of matrices, as model FLOPs utilisation (MFU) counts them: what is
computed again (checkpointing, the chunks of the head), padding and what a mask hides count nothing.
"""

from __future__ import annotations

from llamarl_hpc.batching.packing import PADDING_SEGMENT, MicroBatch
from llamarl_hpc.config.schema import LoraConfig
from llamarl_hpc.training.memory import ModelShape


def pass_flops(
    model: ModelShape, micro_batch: MicroBatch, *, lora: LoraConfig | None, backward: bool
) -> float:
    """Of one forward, and with `backward` one backward pass."""
    if micro_batch.num_tokens == 0:  # a dummy
        return 0.0
    # A token sees those before it and itself: its position in its own sequence says how many.
    is_token = micro_batch.segment_ids != PADDING_SEGMENT
    pairs = int((micro_batch.position_ids[is_token] + 1).sum())
    attention = 2 * model.width * (model.query_width + model.key_width)
    matrices = model.layers * (attention + 3 * model.width * model.inner)
    linear = 2.0 * matrices * micro_batch.num_tokens
    head = 2.0 * model.vocabulary * model.width * len(micro_batch.flat_index)
    scores = 4.0 * model.layers * model.query_width * pairs
    if lora is None:
        return (linear + head + scores) * (3 if backward else 1)
    # frozen weights have no gradient of their own
    adapters = 2.0 * model.num_adapter_parameters(lora) * micro_batch.num_tokens
    if not backward:
        return linear + head + scores + adapters
    return 2 * (linear + head) + 3 * (scores + adapters)
