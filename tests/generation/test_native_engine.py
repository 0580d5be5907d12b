"""The engine against transformers' generate, against itself in other company, and its updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import drain, engine_of, random_prompts, request, run
from tiny_model import EOS, write_tiny_model, write_tiny_tokenizer

from llamarl_hpc.errors import ConfigError, WeightSyncError
from llamarl_hpc.generation.native import linear
from llamarl_hpc.generation.native.engine import NativeEngine
from llamarl_hpc.models.load import load_trainer_model
from llamarl_hpc.models.naming import named_unique_tensors
from llamarl_hpc.types import Completion, FinishReason, GroupCompletions, Purpose, VersionSpan


def _weights(folder: Path, scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's tensors under their names, tied ones once."""
    for name, tensor in named_unique_tensors(load_trainer_model(folder)):
        yield name, tensor.detach() * scale


# Where this was verified, equal means equal bits; other kernels may round by batch size.
ROUNDING = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-5


def _same(one: GroupCompletions, other: GroupCompletions) -> None:
    for a, b in zip(one.completions, other.completions, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.abs(a.logprobs - b.logprobs).max() <= ROUNDING


def test_greedy_tokens_equal_generate(folder: Path) -> None:
    prompts = random_prompts(6, seed=1)
    done = run(
        engine_of(folder),
        [request(i, p, temperature=0.0, max_tokens=20) for i, p in enumerate(prompts)],
    )
    model = load_trainer_model(folder)
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, use_cache=True
            )
        assert done[i].completions[0].token_ids.tolist() == ids[0, len(prompt) :].tolist()


def test_a_group_gets_the_same_tokens_alone_and_in_company(folder: Path) -> None:
    prompts = random_prompts(7, seed=2)
    requests = [
        request(i, p, n=4, temperature=(0.7, 1.0)[i % 2], max_tokens=5 + i)
        for i, p in enumerate(prompts)
    ]
    alone = {i: run(engine_of(folder), [requests[i]])[i] for i in (0, 3, 6)}
    for concurrency, budget in ((4, 16), (9, 64), (64, 2048)):
        engine = engine_of(folder, max_concurrency=concurrency, prefill_tokens=budget)
        together = run(engine, requests)
        assert sorted(together) == list(range(7))
        for i, group in alone.items():
            _same(group, together[i])


def test_a_prefix_shared_with_an_earlier_prompt_changes_nothing(folder: Path) -> None:
    head = random_prompts(1, low=24, high=25, seed=3)[0]
    tails = [*random_prompts(4, low=1, high=9, seed=4), []]  # the last is the head itself
    requests = [request(i, head + tail, n=2, max_tokens=6) for i, tail in enumerate(tails)]
    shared = run(engine_of(folder), requests)
    for i, item in enumerate(requests):
        _same(run(engine_of(folder), [item])[i], shared[i])
    engine = engine_of(folder)  # one group after the other
    for i, item in enumerate(requests):
        _same(run(engine, [item])[i], shared[i])


def test_completions_of_a_group_differ_and_repeat_with_the_seed(folder: Path) -> None:
    prompt = random_prompts(1)[0]
    first = run(engine_of(folder), [request(0, prompt, n=8)])[0].completions
    again = run(engine_of(folder), [request(0, prompt, n=8)])[0].completions
    other = run(engine_of(folder), [request(0, prompt, n=8, seed=1)])[0].completions
    assert len({tuple(c.token_ids.tolist()) for c in first}) == 8
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    assert [c.token_ids.tolist() for c in first] != [c.token_ids.tolist() for c in other]


def test_weights_that_arrive_in_flight_show_in_the_spans_and_in_the_tokens(folder: Path) -> None:
    prompt = random_prompts(1, seed=5)[0]
    engine = engine_of(folder)
    engine.load_weights(3, _weights(folder))

    def switch(step: int) -> None:
        if step == 10:
            engine.load_weights(4, _weights(folder, scale=1.1))

    engine.submit(request(0, prompt, n=2, max_tokens=20))
    mixed = drain(engine, switch)[0].completions
    plain = run(engine_of(folder), [request(0, prompt, n=2, max_tokens=20)])[0].completions
    for completion, before in zip(mixed, plain, strict=True):
        assert completion.versions == [VersionSpan(0, 10, 3), VersionSpan(10, 20, 4)]
        assert (completion.version_min, completion.version_max) == (3, 4)
        assert completion.token_ids[:10].tolist() == before.token_ids[:10].tolist()
        assert np.abs(completion.logprobs[10:] - before.logprobs[10:]).max() > 1e-3
    after = run(engine, [request(1, prompt)])[1].completions[0]
    assert after.versions == [VersionSpan(0, len(after.token_ids), 4)]


def test_new_weights_give_what_an_engine_started_with_them_gives(
    folder: Path, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path, seed=9)
    requests = [request(i, p, n=2) for i, p in enumerate(random_prompts(3))]
    engine = engine_of(folder)
    run(engine, requests)  # leaves a prefix behind that must not survive the update
    engine.load_weights(1, _weights(other))
    updated = run(engine, requests)
    fresh = run(engine_of(other), requests)
    for i in fresh:
        _same(updated[i], fresh[i])


def test_plain_and_packed_matrices_give_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(i, p, n=2) for i, p in enumerate(random_prompts(4))]
    packed = run(engine_of(folder), requests)
    monkeypatch.setattr(linear, "has_onednn", lambda: False)
    engine = engine_of(folder)
    engine.load_weights(1, _weights(folder))
    plain = run(engine, requests)
    for i, group in packed.items():
        for a, b in zip(group.completions, plain[i].completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings_follow_an_update(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path, tied=tied)
    engine = engine_of(folder)
    item = request(0, random_prompts(1)[0], temperature=0.0)
    before = run(engine, [item])[0].completions[0]
    weights = dict(_weights(folder))
    assert ("lm_head.weight" in weights) is (not tied)
    zeroed = {n: t * 0 if "embed" in n or "lm_head" in n else t for n, t in weights.items()}
    engine.load_weights(1, zeroed.items())
    lost = run(engine, [item])[0].completions[0]
    assert lost.logprobs[0] == pytest.approx(-np.log(512), abs=1e-5)  # the head is all zeros
    engine.load_weights(2, weights.items())
    after = run(engine, [item])[0].completions[0]
    assert after.token_ids.tolist() == before.token_ids.tolist()


def test_weights_may_be_overwritten_once_load_weights_has_returned(folder: Path) -> None:
    engine = engine_of(folder)
    item = request(0, random_prompts(1)[0])
    before = run(engine, [item])
    buffer: dict[tuple[int, ...], torch.Tensor] = {}

    def reusing_one_buffer_per_shape() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _weights(folder):
            held = buffer.setdefault(tuple(tensor.shape), torch.empty_like(tensor))
            yield name, held.copy_(tensor)

    engine.load_weights(1, reusing_one_buffer_per_shape())
    for held in buffer.values():
        held.zero_()
    _same(run(engine, [item])[0], before[0])


def test_weights_that_are_not_the_models_are_refused_by_name(folder: Path) -> None:
    engine = engine_of(folder)
    weights = dict(_weights(folder))
    gap = {n: t for n, t in weights.items() if n != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"1 weights did not come.*model\.norm\.weight"):
        engine.load_weights(1, gap.items())
    with pytest.raises(WeightSyncError, match=r"no weight stranger"):
        engine.load_weights(1, [("stranger", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match=r"came as \[3\], wanted \[64\]"):
        engine.load_weights(1, [("model.norm.weight", torch.zeros(3))])
    assert engine.policy_version == 0


def test_the_end_token_is_kept_as_last_token_even_where_padding_has_its_id(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path, pad_token_id=EOS)
    write_tiny_tokenizer(folder, pad_token="<eos>")
    prompt = [5, EOS, 6, EOS, 7]  # end tokens inside the prompt, as chat templates have them
    done = run(engine_of(folder), [request(i, prompt, n=8, max_tokens=40) for i in range(8)])
    completions = [c for group in done.values() for c in group.completions]
    stopped = [c for c in completions if c.finish_reason is FinishReason.STOP]
    cut = [c for c in completions if c.finish_reason is FinishReason.LENGTH]
    assert stopped and cut and len(stopped) + len(cut) == 64
    for c in stopped:
        assert c.token_ids.tolist().count(EOS) == 1 and c.token_ids[-1] == EOS
    for c in cut:
        assert len(c.token_ids) == 40 and EOS not in c.token_ids
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions)


def test_every_listed_end_token_stops_a_completion(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    stops = list(range(100, 200))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": stops}))
    done = run(engine_of(folder), [request(0, [5, 6], n=8, max_tokens=60)])[0].completions
    ends = {int(c.token_ids[-1]) for c in done if c.finish_reason is FinishReason.STOP}
    assert ends <= {*stops, EOS} and len(ends) > 2
    assert all(t not in stops for c in done for t in c.token_ids[:-1].tolist())


def test_completion_text_leaves_out_special_tokens_and_times_are_in_order(folder: Path) -> None:
    engine = engine_of(folder)
    done = run(engine, [request(0, [5, 6], n=8, max_tokens=40)])[0].completions
    for c in done:
        assert "<eos>" not in c.text and c.text
        assert 0 < c.t_start <= c.t_end


def test_counts_rise_and_fall_with_the_work(folder: Path) -> None:
    engine = engine_of(folder, max_concurrency=4)
    assert engine.step() == []
    for i in range(3):
        engine.submit(request(i, [5, 6, 7], n=2, temperature=0.0, max_tokens=4))
    assert (engine.num_running, engine.num_waiting, engine.tokens_processed) == (0, 3, 0)
    engine.step()
    assert (engine.num_running, engine.num_waiting, engine.tokens_processed) == (4, 1, 10)
    done = drain(engine)
    tokens = sum(len(c.token_ids) for group in done.values() for c in group.completions)
    assert engine.tokens_processed == 9 + tokens
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_while_admission_is_paused_running_groups_finish_and_others_wait(folder: Path) -> None:
    engine = engine_of(folder, max_concurrency=2)
    for i in range(2):
        engine.submit(request(i, [5, 6], n=2, max_tokens=3))
    engine.step()
    engine.pause_admission(True)
    finished = [group.group_id for _ in range(6) for group in engine.step()]
    assert finished == [0]
    assert (engine.num_running, engine.num_waiting) == (0, 1)
    engine.pause_admission(False)
    assert list(drain(engine)) == [1]


def test_abort_forgets_everything_and_the_engine_goes_on(folder: Path) -> None:
    engine = engine_of(folder, max_concurrency=2)
    items = [request(i, p, n=2, max_tokens=20) for i, p in enumerate(random_prompts(3))]
    for item in items:
        engine.submit(item)
    engine.step()
    assert engine.abort_all() == [(Purpose.TRAIN, 0), (Purpose.TRAIN, 1), (Purpose.TRAIN, 2)]
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    _same(run(engine, [items[0]])[0], run(engine_of(folder), [items[0]])[0])


def test_a_longer_sequence_makes_the_cache_grow_under_running_ones(folder: Path) -> None:
    short, long = random_prompts(1, seed=6)[0], random_prompts(1, low=100, high=101, seed=7)[0]
    requests = [request(0, short, n=2, max_tokens=16), request(1, long, n=2, max_tokens=100)]
    engine = engine_of(folder, max_context=256)
    engine.submit(requests[0])
    engine.step()
    engine.submit(requests[1])
    done = drain(engine)
    for i, item in enumerate(requests):
        _same(done[i], run(engine_of(folder, max_context=256), [item])[i])


def test_bad_requests_and_models_are_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, max_context=32)
    with pytest.raises(ConfigError, match=r"30 tokens.*context of 32"):
        engine.submit(request(0, [5] * 30, max_tokens=3))
    with pytest.raises(ConfigError, match=r"token 512.*vocabulary has 512"):
        engine.submit(request(0, [5, 512]))
    with pytest.raises(ConfigError, match=r"9 completions.*max_concurrency is 8"):
        engine.submit(request(0, [5], n=9))
    with pytest.raises(ConfigError, match=r"context of 300 .* ends at 256"):
        engine_of(folder, max_context=300)
    windowed = write_tiny_model(tmp_path / "w", "mistral", sliding_window=16)
    with pytest.raises(ConfigError, match=r"window of 16 tokens"):
        engine_of(windowed, max_context=64)
    engine_of(windowed, max_context=16)  # within the window it makes no difference


def test_another_architecture_is_refused_with_the_supported_names(
    folder: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    with pytest.raises(ConfigError, match="llama, mistral, qwen2, qwen3"):
        engine_of(tmp_path)


def test_bf16_weights_and_cache_stay_near_fp32(folder: Path) -> None:
    item = request(0, random_prompts(1)[0], temperature=0.0, max_tokens=1)
    wide = run(engine_of(folder), [item])[0].completions[0]
    engine = NativeEngine(
        folder, dtype="bf16", max_concurrency=2, prefill_tokens=64, max_context=64
    )
    narrow: Completion = run(engine, [item])[0].completions[0]
    assert narrow.token_ids.tolist() == wide.token_ids.tolist()
    assert float(narrow.logprobs[0]) == pytest.approx(float(wide.logprobs[0]), abs=0.1)
