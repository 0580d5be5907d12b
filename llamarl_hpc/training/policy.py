"""The policy as the trainer computes it: micro-batch in, log-probabilities of its tokens out.

Wraps a Hugging Face causal language model without changing it. The model's own head is bypassed:
logits exist only at the positions that predict a completion token (see `logprobs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llamarl_hpc.batching.packing import PADDING_SEGMENT, PROMPT_SEGMENT, MicroBatch
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import load_trainer_model
from llamarl_hpc.training import segment_attention
from llamarl_hpc.training.logprobs import LogprobHead
from llamarl_hpc.training.lora import add_adapters, plain_name

# Models that change logits after the head; their names in a Hugging Face config, and the value
# that means "does nothing".
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


class PolicyModel(nn.Module):
    """Forward: one micro-batch -> (log-probs [K], entropies [K]) at the sampling temperature."""

    def __init__(
        self, causal_lm: Any, *, logprob_chunk_tokens: int, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        _check_head(causal_lm)
        if causal_lm.config._attn_implementation == "sdpa":
            segment_attention.register()
            causal_lm.set_attn_implementation(segment_attention.NAME)
        self.causal_lm = causal_lm
        head = causal_lm.get_output_embeddings()
        self.logprob_head = LogprobHead(
            head.weight, chunk_tokens=logprob_chunk_tokens, entropy_gradient=entropy_gradient
        )

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor | None,
        gather_index: Tensor,
        target_ids: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Shapes as in MicroBatch. Without `segment_ids` attention is plainly causal."""
        mask, more = None, {}
        if segment_ids is not None:
            mask = attention_mask(segment_ids)
            if self.causal_lm.config._attn_implementation == "eager":
                mask = _additive(mask, self.causal_lm.dtype)
            elif segment_ids.device.type == "cpu":
                more = {"segments": segment_attention.cut(segment_ids)}
        hidden_BLD = self.causal_lm.base_model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=False,
            **more,
        ).last_hidden_state
        hidden_KD = hidden_BLD.flatten(0, 1).index_select(0, gather_index)
        logprobs, entropy = self.logprob_head(hidden_KD, target_ids, temperature)
        return logprobs, entropy

    def parameter_names(self) -> dict[str, nn.Parameter]:
        """Parameters under their Hugging Face names, in the model's order; tied ones once.
        Without adapters, which are merged into them elsewhere."""
        return {n: p for n, p in self._plain_names() if ".lora_" not in n}

    def trained_names(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates: all parameters, or the adapters."""
        return {n: p for n, p in self._plain_names() if p.requires_grad}

    def _plain_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.causal_lm.named_parameters():
            yield plain_name(name), parameter


def build_policy(config: Config, model_folder: Path) -> PolicyModel:
    """The model of `model_folder` in the trainer's dtype, on the CPU."""
    trainer = config.trainer
    causal_lm: Any = load_trainer_model(
        model_folder, trainer.dtype, config.model.attn_implementation
    )
    if config.model.lora is not None:
        add_adapters(causal_lm, config.model.lora, seed=config.rollout.seed)
    if trainer.gradient_checkpointing:
        causal_lm.activation_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(
        causal_lm,
        logprob_chunk_tokens=trainer.logprob_chunk_tokens,
        entropy_gradient=config.algorithm.entropy_coef > 0.0,
    )
    return policy.train()  # dropout is 0; only the checkpointing of activations looks at this


def forward_inputs(
    micro_batch: MicroBatch, *, temperature: float, device: torch.device | str
) -> dict[str, Any]:
    """Keyword arguments of `PolicyModel.forward`, on `device`."""
    shared = micro_batch.has_shared_prompt
    return {
        "token_ids": torch.from_numpy(micro_batch.token_ids).to(device),
        "position_ids": torch.from_numpy(micro_batch.position_ids).to(device),
        "segment_ids": torch.from_numpy(micro_batch.segment_ids).to(device) if shared else None,
        "gather_index": torch.from_numpy(micro_batch.gather_index).to(device),
        "target_ids": torch.from_numpy(micro_batch.target_ids).to(device),
        "temperature": temperature,
    }


def attention_mask(segment_ids: Tensor) -> Tensor:
    """Boolean [B, 1, L, L], True where query i may look at key j.

    Nothing later in the row; the prompt, or the query's own segment. Padding sees padding, so
    that no row of the softmax is empty.
    """
    length = segment_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    visible = (query == key) | ((key == PROMPT_SEGMENT) & (query != PADDING_SEGMENT))
    return (visible & causal).unsqueeze(1)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, the dtype's lowest value elsewhere: what eager attention adds."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)


def _check_head(causal_lm: Any) -> None:
    head = causal_lm.get_output_embeddings()
    changed = [
        name
        for name, neutral in _LOGIT_CHANGES.items()
        if getattr(causal_lm.config, name, neutral) != neutral
    ]
    if head is None or getattr(head, "bias", None) is not None or changed:
        found = f"{', '.join(changed)} in its config" if changed else "none, or one with a bias"
        raise ConfigError(
            f"model {causal_lm.config.model_type} must have a plain linear output head, found "
            f"{found}; choose a Llama-like model"
        )
