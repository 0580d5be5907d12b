"""Requests for an engine, and a loop that drives it until nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.types import GenerationRequest, GroupCompletions, Purpose, SamplingParams


def request(
    group_id: int,
    prompt: Sequence[int],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_tokens: int = 8,
    seed: int = 0,
    purpose: Purpose = Purpose.TRAIN,
) -> GenerationRequest:
    return GenerationRequest(
        purpose=purpose,
        group_id=group_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        num_generations=n,
        sampling=SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed
        ),
    )


def random_prompts(count: int, *, low: int = 3, high: int = 30, seed: int = 0) -> list[list[int]]:
    """Prompts of differing lengths, without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 512, rng.integers(low, high)).tolist() for _ in range(count)]


def engine_of(
    folder: Path,
    *,
    max_concurrency: int = 8,
    prefill_tokens: int = 64,
    max_context: int = 128,
    recompute_kv_cache: bool = False,
    int8: bool = False,
) -> NativeEngine:
    return NativeEngine(
        folder,
        dtype="fp32",
        max_concurrency=max_concurrency,
        prefill_tokens=prefill_tokens,
        max_context=max_context,
        recompute_kv_cache=recompute_kv_cache,
        int8=int8,
    )


def drain(
    engine: NativeEngine, before_step: Callable[[int], None] = lambda step: None
) -> dict[int, GroupCompletions]:
    """Step until idle; groups by id. `before_step` gets the number of the coming step."""
    done: dict[int, GroupCompletions] = {}
    for step in range(10_000):
        if not engine.num_running and not engine.num_waiting:
            return done
        before_step(step)
        for group in engine.step():
            assert group.group_id not in done
            done[group.group_id] = group
    raise AssertionError("the engine did not finish")


def run(engine: NativeEngine, requests: Sequence[GenerationRequest]) -> dict[int, GroupCompletions]:
    for item in requests:
        engine.submit(item)
    return drain(engine)
