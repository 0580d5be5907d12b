"""The codec: what goes in comes out, and what is not a message is refused, whatever it is."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from llamarl_hpc.channels.codec import decode, encode
from llamarl_hpc.channels.messages import (
    Generate,
    Generated,
    Heartbeat,
    Ping,
    Score,
    ScoreItem,
    Stop,
    ToController,
    ToExecutor,
    Train,
    Trained,
)
from llamarl_hpc.errors import ChannelError
from llamarl_hpc.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupCompletions,
    Purpose,
    SamplingParams,
    TrainBatch,
    VersionSpan,
)


def completion(length: int, seed: int = 0) -> Completion:
    rng = np.random.default_rng(seed)
    return Completion(
        token_ids=rng.integers(0, 50_000, length, dtype=np.int32),
        logprobs=-rng.random(length, dtype=np.float32),
        versions=[VersionSpan(0, length, 3)],
        finish_reason=FinishReason.STOP,
        text="4\u00e9\n",
        t_start=1.5,
        t_end=2.25,
    )


def generated() -> Generated:
    groups = [
        GroupCompletions(
            purpose=Purpose.TRAIN, group_id=g, completions=[completion(5 + g + i) for i in range(3)]
        )
        for g in range(4)
    ]
    return Generated(groups=groups)


def generate() -> Generate:
    request = GenerationRequest(
        purpose=Purpose.EVAL,
        group_id=7,
        prompt_ids=np.arange(9, dtype=np.int32),
        num_generations=2,
        sampling=SamplingParams(temperature=0.7, max_tokens=16, seed=2**40),
    )
    return Generate(requests=[request])


def score(**columns: Any) -> Score:
    item = ScoreItem(purpose=Purpose.TRAIN, group_id=1, prompt="p", columns=columns, completions=[])
    return Score(items=[item])


def test_completions_come_back_bit_equal() -> None:
    message = generated()
    back = decode(encode(message), ToController)
    assert isinstance(back, Generated) and len(back.groups) == 4
    for group, group_back in zip(message.groups, back.groups, strict=True):
        assert group.group_id == group_back.group_id
        for one, other in zip(group.completions, group_back.completions, strict=True):
            assert other.token_ids.dtype == np.int32
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert one.versions == other.versions and one.text == other.text
            assert other.finish_reason is FinishReason.STOP


def test_every_allowed_dtype_and_layout_comes_back() -> None:
    arrays = {
        "bool": np.array([True, False]),
        "uint8": np.arange(3, dtype=np.uint8),
        "int8": np.arange(-2, 2, dtype=np.int8),
        "int16": np.arange(4, dtype=np.int16),
        "int64": np.array(5, dtype=np.int64),
        "float16": np.array([[1.5], [np.inf]], dtype=np.float16),
        "float64": np.zeros((0, 3)),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "strided": np.arange(10, dtype=np.int32)[::-3],
        "big_endian": np.arange(4, dtype=">f4"),
    }
    back = decode(encode(score(**arrays)), ToExecutor).items[0].columns
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].shape == array.shape and back[name].dtype.name == array.dtype.name


def test_numpy_scalars_in_a_data_row_become_plain_numbers() -> None:
    back = decode(encode(score(a=np.int64(3), b=np.float32(0.5), c=np.True_)), ToExecutor)
    assert back.items[0].columns == {"a": 3, "b": 0.5, "c": True}


def test_arrays_are_sent_and_received_without_a_copy() -> None:
    logprobs = np.zeros(4 << 20, dtype=np.float32)
    message = Trained(step=1, version=2, metrics={"loss": 0.5}, logprobs=logprobs)
    tracemalloc.start()
    frames = encode(message)
    back = decode(frames, ToController)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert np.shares_memory(back.logprobs, logprobs)
    assert not back.logprobs.flags.writeable


def test_a_large_message_is_refused_on_both_sides() -> None:
    message = Trained(step=1, version=2, metrics={}, logprobs=np.zeros(1000, dtype=np.float32))
    with pytest.raises(ChannelError, match=r"Trained has 4,\d+ bytes .*max_message_mb"):
        encode(message, max_bytes=4000)
    with pytest.raises(ChannelError, match="max_message_mb"):
        decode(encode(message), ToController, max_bytes=4000)


def test_objects_and_object_arrays_do_not_travel() -> None:
    with pytest.raises(ChannelError, match="object"):
        encode(score(a=np.array([object()])))
    with pytest.raises(ChannelError, match="complex128"):
        encode(score(a=np.zeros(2, dtype=np.complex128)))
    with pytest.raises(ChannelError, match="cannot travel"):
        encode(score(a=random.Random()))
    with pytest.raises(ChannelError, match="cannot be encoded"):
        encode(score(a=2**70))


def test_the_wrong_side_is_refused() -> None:
    with pytest.raises(ChannelError, match="malformed"):
        decode(encode(Ping(sequence=1)), ToController)
    with pytest.raises(ChannelError, match="malformed"):
        decode(encode(Heartbeat(sequence=1)), ToExecutor)


def reference(index: int, dtype: str, shape: Any, code: int = 1) -> bytes:
    inner = msgspec.msgpack.encode((index, dtype, shape))
    message = {
        "kind": "trained",
        "step": 1,
        "version": 1,
        "metrics": {},
        "logprobs": msgspec.msgpack.Ext(code, inner),
    }
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize(
    ("header", "frames"),
    [
        (reference(0, "object", [1]), [bytes(8)]),
        (reference(0, "complex64", [1]), [bytes(8)]),
        (reference(0, ">f4", [1]), [bytes(4)]),
        (reference(0, "float32", [2]), [bytes(4)]),
        (reference(0, "float32", [2**62, 2**62]), [bytes(4)]),
        (reference(0, "float32", [2**63, 2]), [bytes(4)]),
        (reference(0, "float32", [-1, -1]), [bytes(4)]),
        (reference(0, "float32", [1] * 70), [bytes(4)]),
        (reference(0, "float32", [0, 2**63]), [b""]),
        (reference(1, "float32", [1]), [bytes(4)]),
        (reference(-1, "float32", [1]), [bytes(4)]),
        (reference(2**63, "float32", [1]), [bytes(4)]),
        (reference(0, "float32", [1]), [bytes(4), bytes(4)]),
        (reference(0, "float32", [1]), []),
        (reference(0, "float32", [1.5]), [bytes(4)]),
        (reference(0, "float32", "x"), [bytes(4)]),
        (reference(0, "float32", [1], code=5), [bytes(4)]),
        (reference(0, "float32", [1])[:-1], [bytes(4)]),
        (reference(0, "float32", [1]) + b"\0", [bytes(4)]),
        (b"\x82\xa4kind\xa8generate\xa8requests\xdd\xff\xff\xff\xff", []),
        (b"\x82\xa4kind\xa5score\xa5items\x91\x81\xa7columns" + b"\x81\xa1a" * 5000, []),
        (b"\x91" * 100_000, []),
        (b"", []),
    ],
)
def test_malformed_messages_are_refused(header: bytes, frames: list[bytes]) -> None:
    for kinds in (ToController, ToExecutor):
        with pytest.raises(ChannelError):
            decode([header, *frames], kinds)


def test_no_frames_at_all_are_refused() -> None:
    with pytest.raises(ChannelError, match="empty"):
        decode([], ToController)


def test_damaged_messages_give_a_message_or_a_channel_error_and_nothing_else() -> None:
    rng = random.Random(0)
    batch = TrainBatch(
        step=1,
        temperature=1.0,
        prompt_ids=np.arange(4, dtype=np.int32),
        prompt_lengths=np.array([4], dtype=np.int32),
        group_index=np.zeros(1, dtype=np.int32),
        completion_ids=np.arange(3, dtype=np.int32),
        completion_lengths=np.array([3], dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        loss_mask=np.ones(3, dtype=bool),
        advantages=np.ones(1, dtype=np.float32),
    )
    messages = [
        (generated(), ToController),
        (generate(), ToExecutor),
        (Train(batch=batch), ToExecutor),
        (Stop(reason="done"), ToExecutor),
        (score(a=np.arange(3), b=["x", {"y": None}]), ToExecutor),
    ]
    refused = 0
    for _ in range(6000):
        message, kinds = rng.choice(messages)
        frames = [bytearray(frame) for frame in encode(message)]
        for _ in range(rng.randint(1, 3)):
            damage(frames, rng)
        try:
            decode([bytes(frame) for frame in frames], kinds)
        except ChannelError:
            refused += 1
    assert refused > 3000


LENGTHS = [b"\xdd\xff\xff\xff", b"\xc1", b"\xc9\xff\xff\xff\xff\x01"]  # lists, bytes without end


def damage(frames: list[bytearray], rng: random.Random) -> None:
    target = frames[0] if rng.random() < 0.8 and frames else rng.choice(frames or [bytearray()])
    action = rng.randint(0, 6)
    if action == 0 and target:
        target[rng.randrange(len(target))] = rng.randrange(256)
    elif action == 1 and target:
        del target[rng.randrange(len(target)) :]
    elif action == 2:
        target += rng.randbytes(rng.randint(1, 20))
    elif action == 3 and target:
        at = rng.randrange(len(target))
        target[at : at + 4] = rng.choice(
            [b"\xdd\xff\xff\xff", b"\xc1", b"\xc9\xff\xff\xff\xff\x01"]
        )
    elif action == 4 and len(frames) > 1:
        frames.pop(rng.randrange(len(frames)))
    elif action == 5:
        frames.append(bytearray(rng.randbytes(rng.randint(0, 40))))
    else:
        target[:] = rng.randbytes(len(target))
