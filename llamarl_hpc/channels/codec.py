"""Messages to frames and back: a msgpack header, then one raw frame per numpy array.

    encode(message)  ->  [header, array 0, array 1, ...]      array bytes are not copied
    decode(frames)   ->  message                              arrays are read-only views of frames

An array may sit anywhere in a message, in untyped places (`columns`) too: the header holds an
extension value (frame index, dtype, shape) where it was. Nothing is ever unpickled, so bytes from
outside can at worst be refused: whatever `decode` is given, it returns a message of the expected
kinds or raises `ChannelError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from llamarl_hpc.errors import ChannelError
from llamarl_hpc.types import Array

Frame: TypeAlias = bytes | bytearray | memoryview

DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}
MAX_FRAMES = 1 << 18  # header included
MAX_DIMENSIONS = 8
DEFAULT_MAX_BYTES = 512 << 20

_ARRAY = 1  # msgpack extension code
_REFERENCE = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...]])


def encode(message: msgspec.Struct, *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Frame]:
    """The frames of `message`. Array frames are views: send them before the arrays change.

    Raises ChannelError when the message is larger than `max_bytes`, or holds something that may
    not travel (an array of another dtype, an object of another kind).
    """
    arrays: list[Frame] = []

    def replace(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise ChannelError(f"a {type(value).__name__} cannot travel in {_kind(message)}")
        arrays.append(_raw(value, message))
        reference = (len(arrays) - 1, value.dtype.name, value.shape)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(reference))

    try:
        header = msgspec.msgpack.Encoder(enc_hook=replace).encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ChannelError(f"{_kind(message)} cannot be encoded: {error}") from error
    frames = [header, *arrays]
    _check_size(frames, max_bytes, _kind(message))
    return frames


def decode(frames: Sequence[Frame], kinds: Any, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
    """The message in `frames`, one of `kinds` (a Struct type or a union of them).

    Arrays are read-only views that keep their frame alive. Raises ChannelError for everything
    that is not exactly one whole message of these kinds within the limits.
    """
    if not frames:
        raise ChannelError("an empty message was refused")
    _check_size(frames, max_bytes, "a message")
    used = [False] * (len(frames) - 1)

    def restore(code: int, data: memoryview) -> Array:
        index, dtype, shape = _REFERENCE.decode(data)
        if code != _ARRAY or not 0 <= index < len(used) or used[index]:
            raise ValueError("an array refers to no frame of its own")
        used[index] = True
        return _view(frames[1 + index], dtype, shape)

    decoder = msgspec.msgpack.Decoder(kinds, ext_hook=restore, dec_hook=_as_is)
    try:
        message = decoder.decode(frames[0])
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        raise ChannelError(f"a malformed message was refused: {error}") from error
    if not all(used):
        raise ChannelError(f"a message was refused: {used.count(False)} frames belong to no array")
    return message


def _kind(message: msgspec.Struct) -> str:
    return type(message).__name__


def _check_size(frames: Sequence[Frame], max_bytes: int, what: str) -> None:
    if len(frames) > MAX_FRAMES:
        raise ChannelError(f"{what} has {len(frames)} frames; {MAX_FRAMES} are allowed")
    size = sum(memoryview(frame).nbytes for frame in frames)
    if size > max_bytes:
        raise ChannelError(
            f"{what} has {size:,} bytes but channels.max_message_mb allows {max_bytes:,}; "
            "raise it or send less in one message"
        )


def _raw(array: Array, message: msgspec.Struct) -> Frame:
    """The array's bytes in C order, little-endian; a copy only where it is laid out otherwise."""
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        raise ChannelError(
            f"an array of {array.dtype.name} cannot travel in {_kind(message)}; "
            f"use one of {', '.join(DTYPES)}"
        )
    contiguous = np.ascontiguousarray(array, dtype=dtype)
    return contiguous.reshape(-1).view(np.uint8).data if array.size else b""


def _view(frame: Frame, name: str, shape: tuple[int, ...]) -> Array:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"arrays of {name[:32]!r} are not accepted")
    if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape):
        raise ValueError("an array has an impossible shape")
    if math.prod(shape) * dtype.itemsize != memoryview(frame).nbytes:
        raise ValueError(f"an array of {shape} {name} does not fill its frame")
    array = np.frombuffer(frame, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _as_is(expected: type, value: Any) -> Any:
    """Called for arrays in typed places; msgspec checks the type of what is returned."""
    return value
