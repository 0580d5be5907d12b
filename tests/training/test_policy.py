"""The policy model: shared prompts equal separate rows, tokens line up, padding is invisible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loss_configs import ALGORITHMS, name_of
from tiny_policy import random_batch, tiny_model
from torch import Tensor, nn

from llamarl_hpc.batching.packing import micro_batches_of_rank, token_weights
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import AlgorithmConfig
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.training.loss import micro_batch_loss
from llamarl_hpc.training.policy import PolicyModel, attention_mask, forward_inputs
from llamarl_hpc.types import TrainBatch


def policy64(
    attention: str = "sdpa", *, entropy_gradient: bool = False, **overrides: Any
) -> PolicyModel:
    """Float64 throughout: the model's own norms would round to float32 on the way."""
    causal_lm = tiny_model(**overrides)
    for parent in list(causal_lm.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                setattr(parent, name, norm)
    causal_lm.double().set_attn_implementation(attention)
    return PolicyModel(causal_lm, logprob_chunk_tokens=7, entropy_gradient=entropy_gradient)


def compute(
    policy: PolicyModel,
    batch: TrainBatch,
    *,
    share_prompt: bool,
    budget: int = 10_000,
    num_ranks: int = 1,
    **algorithm: Any,
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Log-probs in the batch's order, loss and gradients, summed over all ranks."""
    settings = LossSettings.of(AlgorithmConfig.model_validate(algorithm))
    weights = token_weights(batch, aggregation=settings.aggregation, max_completion_length=16)
    logprobs = torch.full((len(batch.completion_ids),), torch.nan, dtype=torch.float64)
    policy.zero_grad()
    total = 0.0
    for rank in range(num_ranks):
        for micro_batch in micro_batches_of_rank(
            batch,
            weights,
            rank=rank,
            num_ranks=num_ranks,
            micro_batch_tokens=budget,
            share_prompt=share_prompt,
        ):
            inputs = forward_inputs(micro_batch, temperature=batch.temperature, device="cpu")
            logprobs_K, entropy_K = policy(**inputs)
            loss, _ = micro_batch_loss(micro_batch, logprobs_K, entropy_K, settings=settings)
            loss.backward()
            total += loss.item()
            index = torch.from_numpy(micro_batch.flat_index)
            logprobs[index] = logprobs_K.detach()[: len(index)]
    gradients = {name: p.grad.clone() for name, p in policy.parameter_names().items()}  # type: ignore[union-attr]
    return logprobs, total, gradients


def assert_same(
    a: tuple[Tensor, float, Any], b: tuple[Tensor, float, Any], atol: float = 1e-13
) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=10 * atol)
    assert a[1] == pytest.approx(b[1], rel=10 * atol)
    assert a[2].keys() == b[2].keys()
    for name in a[2]:
        torch.testing.assert_close(a[2][name], b[2][name], rtol=0, atol=atol)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_a_shared_prompt_gives_the_gradients_of_separate_rows(
    attention: str, temperature: float
) -> None:
    policy, batch = policy64(attention), random_batch(temperature=temperature)
    atol = 1e-13 if attention == "sdpa" else 1e-7  # eager attention has a float32 softmax
    separate = compute(policy, batch, share_prompt=False)
    assert_same(compute(policy, batch, share_prompt=True), separate, atol)
    assert_same(compute(policy, batch, share_prompt=True, budget=40), separate, atol)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_micro_batches_ranks_packing_and_padding_change_nothing(algorithm: dict[str, Any]) -> None:
    policy = policy64(entropy_gradient="entropy_coef" in algorithm)
    batch = random_batch(num_groups=5)
    whole = compute(policy, batch, share_prompt=True, **algorithm)
    assert any(gradient.abs().max() > 1e-6 for gradient in whole[2].values())
    for budget, num_ranks in ((30, 1), (100, 1), (64, 2), (64, 3), (64, 7)):
        for share_prompt in (True, False):
            split = compute(
                policy,
                batch,
                share_prompt=share_prompt,
                budget=budget,
                num_ranks=num_ranks,
                **algorithm,
            )
            assert_same(split, whole)


def test_log_probs_belong_to_their_tokens() -> None:
    """Against the model's own logits, one sequence at a time, without any of our code."""
    policy, batch = policy64(tied=False), random_batch(temperature=1.3)
    logprobs, _, _ = compute(policy, batch, share_prompt=True)
    prompts = np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1])
    completions = np.split(batch.completion_ids, np.cumsum(batch.completion_lengths)[:-1])
    expected = []
    for group, completion in zip(batch.group_index, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([prompts[group], completion]).astype(np.int64))
        with torch.no_grad():
            logits = policy.causal_lm(ids[None]).logits[0] / 1.3
        for t in range(len(prompts[group]), len(ids)):
            expected.append(logits[t - 1].log_softmax(-1)[ids[t]])
    torch.testing.assert_close(logprobs, torch.stack(expected), rtol=0, atol=1e-12)


def test_a_completion_cannot_see_its_siblings_or_the_padding() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 2, 3, 3, -1, -1]])
    visible = attention_mask(segments)[0, 0]
    assert visible.shape == (9, 9)
    seen = {i: [j for j in range(9) if visible[i, j]] for i in range(9)}
    assert seen[1] == [0, 1]
    assert seen[3] == [0, 1, 2, 3]
    assert seen[4] == [0, 1, 4]
    assert seen[6] == [0, 1, 5, 6]
    assert seen[8] == [7, 8]  # not empty, or the softmax would be nan


def test_changing_a_sibling_changes_no_log_prob_of_the_others() -> None:
    policy, batch = policy64(), random_batch(num_groups=1, num_generations=3)
    before, _, _ = compute(policy, batch, share_prompt=True)
    first = int(batch.completion_lengths[0])
    batch.completion_ids[:first] = (batch.completion_ids[:first] + 17) % 512
    after, _, _ = compute(policy, batch, share_prompt=True)
    assert torch.equal(before[first:], after[first:])
    assert not torch.equal(before[:first], after[:first])


def test_gradient_checkpointing_changes_no_bit() -> None:
    policy, batch = policy64(), random_batch()
    plain = compute(policy, batch, share_prompt=True)
    policy.causal_lm.activation_checkpointing_enable({"use_reentrant": False})
    policy.train()
    checkpointed = compute(policy, batch, share_prompt=True)
    assert torch.equal(plain[0], checkpointed[0])
    assert all(torch.equal(plain[2][name], checkpointed[2][name]) for name in plain[2])


def test_a_model_that_bends_its_logits_is_refused() -> None:
    causal_lm = tiny_model()
    causal_lm.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        PolicyModel(causal_lm, logprob_chunk_tokens=8)
