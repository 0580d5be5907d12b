"""What has changed since a version that the receiver holds, without any loss.

An optimizer step at a small learning rate leaves most bfloat16 weights as they are, bit for bit:
the update is less than half of their last place. So the changed words travel, and their places:

    codes   uint8, one for each changed word: how many unchanged ones lie before it. 255 stands for
            255 unchanged words and no changed one
    (0)     one byte, if that leaves the values on an odd one
    words   the new values of the changed words, in order

Three bytes for a changed bfloat16, so half of the bytes are saved while less than a third has
changed. A bitmap of the places would be smaller only above one changed word in eight, where little
is saved anyway. Words are compared as bits: NaN and -0.0 are what they are. A word has two bytes
(half a float32, whose upper half seldom changes), or one where bytes are among the weights.

A delta is made of neighbouring buckets of one trainer rank, as they lie in its snapshot
(`bucket_starts`); a `Chart` tells where their words belong in the receiver's arena.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.weight_sync.plan import ALIGNMENT, ITEM_BYTES, Arena, Bucket

PAYS = 0.5  # of the bytes; a delta that is larger is not worth the work at both ends
_BLOCK = 1 << 19  # words that are compared at a time: what is found then stays in the cache
_SKIP = 255  # the code of so many unchanged words


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a delta's bytes; the receiver must know it beforehand."""

    num_codes: int
    num_words: int  # changed
    word_bytes: int

    @property
    def words_at(self) -> int:
        """The byte at which the values start."""
        return self.num_codes + self.num_codes % self.word_bytes

    @property
    def num_bytes(self) -> int:
        return max(self._end, 1)  # a broadcast needs one

    @property
    def _end(self) -> int:
        return self.words_at + self.num_words * self.word_bytes

    def values(self, data: torch.Tensor) -> torch.Tensor:
        return _words(data[self.words_at : self._end], self.word_bytes)


class Chart:
    """Where the words of neighbouring buckets of a rank lie in the arena."""

    def __init__(
        self, arena: Arena, buckets: Sequence[Bucket], delta: Delta, device: torch.device
    ) -> None:
        starts, self.num_bytes = bucket_starts(buckets)
        here = [s + p.offset for s, b in zip(starts, buckets, strict=True) for p in b.pieces]
        there = [arena.position(p.name, p.dtype, p.start) for b in buckets for p in b.pieces]
        self._here = torch.tensor(here, device=device) // delta.word_bytes
        self._shift = torch.tensor(there, device=device) // delta.word_bytes - self._here

    def to_arena(self, places: torch.Tensor) -> torch.Tensor:
        """Of words of the buckets, their places in the arena."""
        piece = torch.searchsorted(self._here, places, right=True) - 1
        return places + self._shift[piece]


def bucket_starts(buckets: Sequence[Bucket]) -> tuple[list[int], int]:
    """The byte at which each bucket starts where they lie one after the other; bytes in all."""
    starts, end = [], 0
    for bucket in buckets:
        starts.append(end)
        end += -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
    return starts, end


def word_bytes(buckets: Sequence[Bucket]) -> int:
    return min(2, *(ITEM_BYTES[piece.dtype] for bucket in buckets for piece in bucket.pieces))


def encode(
    new: torch.Tensor, base: torch.Tensor, word_bytes: int
) -> tuple[Delta, torch.Tensor] | None:
    """The delta that makes `new` of `base` (both uint8 [bytes], words not cut), and its bytes.

    None if it would not pay.
    """
    limit = int(PAYS * len(new))
    words = _words(new, word_bytes)
    places = _differing(words, _words(base, word_bytes))
    if len(places) * (1 + word_bytes) > limit:
        return None
    gaps = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    skips = gaps // _SKIP
    ends = torch.cumsum(skips + 1, 0) - 1  # where the code of each changed word is
    delta = Delta(
        num_codes=int(ends[-1]) + 1 if len(ends) else 0,
        num_words=len(places),
        word_bytes=word_bytes,
    )
    if delta.num_bytes > limit:
        return None
    data = torch.zeros(delta.num_bytes, dtype=torch.uint8, device=new.device)
    codes = data[: delta.num_codes].fill_(_SKIP)
    codes[ends] = (gaps - skips * _SKIP).to(torch.uint8)
    delta.values(data).copy_(words[places])
    return delta, data


def decode(delta: Delta, data: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(places of the changed words, int64, ascending; their new values).

    Raises WeightSyncError where `data` cannot be a delta of `num_bytes`.
    """
    codes = data[: delta.num_codes]
    ends = _nonzero(codes != _SKIP)
    if len(ends) != delta.num_words:
        raise WeightSyncError(
            f"a delta of {delta.num_words} changed words has the places of {len(ends)}"
        )
    unchanged = torch.cumsum(codes, 0, dtype=torch.int64)[ends]
    places = unchanged + torch.arange(len(ends), device=data.device)
    num_words = num_bytes // delta.word_bytes
    if len(places) and int(places[-1]) >= num_words:
        raise WeightSyncError(f"a delta changes word {int(places[-1])} of {num_words}")
    return places, delta.values(data)


def apply(delta: Delta, data: torch.Tensor, chart: Chart, memory: torch.Tensor) -> None:
    """Write the changed words into the arena (uint8), which holds the base."""
    places, values = decode(delta, data, chart.num_bytes)
    _words(memory, delta.word_bytes)[chart.to_arena(places)] = values


def _words(raw: torch.Tensor, word_bytes: int) -> torch.Tensor:
    return raw.view(torch.int16) if word_bytes == 2 else raw


def _differing(new: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """int64, ascending: where they differ."""
    if new.device.type != "cpu":
        return _nonzero(new != base)
    ours, theirs = new.numpy(), base.numpy()  # numpy compares five times as fast as torch here
    is_other = np.empty(min(_BLOCK, len(ours)), dtype=bool)
    found = [np.zeros(0, dtype=np.int64)]
    for start in range(0, len(ours), _BLOCK):
        end = min(start + _BLOCK, len(ours))
        mask = is_other[: end - start]
        np.not_equal(ours[start:end], theirs[start:end], out=mask)
        found.append(np.flatnonzero(mask) + start)
    return torch.from_numpy(np.concatenate(found))


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)
