"""What texts have in common and how they repeat themselves: plain functions of strings.

Words are runs of letters and digits, or single signs; lower case. In phrases every number is the
same word, `<n>`: which number is right depends on the question, how an answer is put does not.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llamarl_hpc.types import Array

MAX_CHARS = 4000  # of a text that are looked at
_WORD = re.compile(r"\w+|[^\w\s]+")
_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*")
_HASHES, _BANDS = 64, 16  # of four hashes each: finds pairs from a similarity of about 0.5 on
_SHINGLE = 3  # words
_SHORTEST = 64  # bytes below which a text cannot be compressed anyway


def words(text: str) -> list[str]:
    return _WORD.findall(text[:MAX_CHARS].lower())


def numbers(text: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(text[:MAX_CHARS]))


def repeated_share(text: str, n: int = 4) -> float:
    """Share of the runs of `n` words that had been there before; 0 for short texts."""
    grams = _grams(words(text), n)
    return 1.0 - len(set(grams)) / len(grams) if len(grams) >= n else 0.0


def compression_ratio(text: str) -> float:
    """Bytes over bytes after deflate: about 2 for prose, far more for a text in a loop."""
    data = text[:MAX_CHARS].encode("utf-8", errors="replace")
    return len(data) / len(zlib.compress(data, 6)) if len(data) >= _SHORTEST else 1.0


def _grams(parts: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]


# ---------------------------------------------------------------- alike


def near_duplicates(texts: Sequence[str], *, least: float = 0.8) -> list[list[int]]:
    """Groups of texts that say the same with the same numbers, the largest first.

    Alike are two texts whose sets of three-word runs overlap by `least` or more (Jaccard, as
    MinHash estimates it; Broder 1997); case, space and signs do not matter.
    """
    signatures = [_signature(text) for text in texts]
    leader = list(range(len(texts)))
    seen: dict[tuple[int, bytes, tuple[str, ...]], int] = {}
    for index, (text, signature) in enumerate(zip(texts, signatures, strict=True)):
        own = numbers(text)
        for band, hashes in enumerate(np.split(signature, _BANDS)):
            first = seen.setdefault((band, hashes.tobytes(), own), index)
            if first != index and float((signatures[first] == signature).mean()) >= least:
                leader[index] = leader[first]
                break
    found: dict[int, list[int]] = defaultdict(list)
    for index, first in enumerate(leader):
        found[first].append(index)
    return sorted((m for m in found.values() if len(m) > 1), key=len, reverse=True)


def _signature(text: str) -> Array:
    """uint64 [_HASHES]: the smallest hash of any three-word run, for each of so many hashes."""
    import xxhash

    parts = [word for word in words(text) if word[0].isalnum() or word[0] == "_"]
    shingles = {" ".join(gram) for gram in _grams(parts, _SHINGLE)} or {" ".join(parts)}
    hashed = np.array([xxhash.xxh3_64_intdigest(s.encode()) for s in shingles], dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = hashed[:, None] * _FACTORS + _TERMS
    mixed ^= mixed >> np.uint64(29)
    smallest: Array = mixed.min(axis=0)
    return smallest


_RNG = np.random.default_rng(20_261)
_FACTORS = _RNG.integers(1, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_TERMS = _RNG.integers(0, 2**63, _HASHES, dtype=np.uint64)


# ---------------------------------------------------------------- phrases


@dataclass(frozen=True, kw_only=True, slots=True)
class Phrase:
    """A run of words that well-paid texts have more often than others."""

    text: str
    share_paid: float  # of the texts that were paid more than their group's mean
    share_unpaid: float
    z: float  # log-odds ratio over its standard error
    examples: list[int]  # indices of paid texts that have it


def most_paid_phrases(
    texts: Sequence[str], paid: Sequence[bool], *, limit: int = 10, longest: int = 4
) -> list[Phrase]:
    """Phrases of one to `longest` words, by how far they are over-represented in paid texts."""
    having: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for text, good in zip(texts, paid, strict=True):
        having[not good].update(phrases(text, longest))
    num_paid = sum(paid)
    num_unpaid = len(texts) - num_paid
    least = max(5, num_paid // 100)
    scored = [
        (_log_odds(count, num_paid, having[1][phrase], num_unpaid), len(phrase), phrase)
        for phrase, count in having[0].items()
        if count >= least
    ]
    chosen = _distinct(sorted(scored, reverse=True), having[0], limit)
    examples = _examples({phrase for _, phrase in chosen}, texts, paid, longest)
    return [
        Phrase(
            text=phrase,
            share_paid=having[0][phrase] / max(num_paid, 1),
            share_unpaid=having[1][phrase] / max(num_unpaid, 1),
            z=z,
            examples=examples[phrase],
        )
        for z, phrase in chosen
    ]


def phrases(text: str, longest: int) -> set[str]:
    """All runs of one to `longest` words; numbers are `<n>`."""
    plain = _NUMBER.sub(" 0 ", text[:MAX_CHARS])
    parts = ["<n>" if word == "0" else word for word in words(plain)]
    return {" ".join(gram) for n in range(1, longest + 1) for gram in _grams(parts, n)}


def share_with(phrase: str, texts: Iterable[str]) -> float:
    """Share of the texts that have the phrase."""
    n = len(phrase.split(" "))
    found = [phrase in phrases(text, n) for text in texts]
    return sum(found) / len(found) if found else 0.0


def _log_odds(a: int, of_a: int, b: int, of_b: int) -> float:
    """z of the log-odds ratio, counts smoothed by a half (Haldane 1956)."""
    cells = [a + 0.5, of_a - a + 0.5, b + 0.5, of_b - b + 0.5]
    ratio = math.log(cells[0] * cells[3] / (cells[1] * cells[2]))
    return ratio / math.sqrt(sum(1.0 / cell for cell in cells))


def _distinct(
    scored: Iterable[tuple[float, int, str]], counts: Counter[str], limit: int
) -> list[tuple[float, str]]:
    """The best, without pieces of what is there already."""
    chosen: list[tuple[float, str]] = []
    for z, _, phrase in scored:
        if z <= 0.0 or len(chosen) == limit:
            break
        if not any(_is_piece(phrase, other, counts) for _, other in chosen):
            chosen.append((z, phrase))
    return chosen


def _is_piece(a: str, b: str, counts: Counter[str]) -> bool:
    """They share half of their words, and are about as common."""
    words_a, words_b = set(a.split(" ")), set(b.split(" "))
    shared = len(words_a & words_b)
    alike = min(counts[a], counts[b]) > 0.8 * max(counts[a], counts[b])
    return alike and 2 * shared >= min(len(words_a), len(words_b))


def _examples(
    chosen: set[str], texts: Sequence[str], paid: Sequence[bool], longest: int
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {phrase: [] for phrase in chosen}
    for index, (text, good) in enumerate(zip(texts, paid, strict=True)):
        if good and any(len(indices) < 3 for indices in found.values()):
            for phrase in chosen & phrases(text, longest):
                if len(found[phrase]) < 3:
                    found[phrase].append(index)
    return found
