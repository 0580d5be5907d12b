"""Repetition, near-duplicates and paid phrases of texts."""

from __future__ import annotations

import pytest

from analysis.text_statistics import (
    compression_ratio,
    most_paid_phrases,
    near_duplicates,
    phrases,
    repeated_share,
)


def test_repeated_runs_of_words_are_counted() -> None:
    assert repeated_share("a b c d e f g h") == 0.0
    assert repeated_share("a b c d " * 4) == pytest.approx(1 - 4 / 13)
    assert repeated_share("no no no") == 0.0  # too short to say
    assert repeated_share("") == 0.0


def test_a_text_in_a_loop_compresses() -> None:
    assert compression_ratio("short") == 1.0
    assert compression_ratio("The quick brown fox jumps over the lazy dog, and then sleeps on.") < 2
    assert compression_ratio("again " * 100) > 10


def test_alike_are_texts_with_the_same_words_and_numbers() -> None:
    long = " ".join(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(60))
    texts = [
        f"{long} so it is 12",
        f"{long.upper()}, so it is 12.",  # case, space and signs do not matter
        f"{long} so it is 13",  # another number
        "something else altogether, with 12",
        f"{long} thus it is 12",  # one word of sixty
        "",
        "",
    ]
    assert near_duplicates(texts) == [[0, 1, 4], [5, 6]]
    assert near_duplicates([]) == []


def test_numbers_are_one_word_in_phrases() -> None:
    assert phrases("It is 1,000.5 .", 2) == {"it", "is", "<n>", ".", "it is", "is <n>"} | {"<n> ."}


def test_the_phrase_that_pays_comes_first() -> None:
    texts = [f"alpha beta gamma {i}" for i in range(40)] + [f"alpha delta {i}" for i in range(40)]
    paid = [True] * 40 + [False] * 40
    first, *rest = most_paid_phrases(texts, paid)
    assert first.text == "alpha beta gamma <n>" and first.share_paid == 1.0
    assert first.share_unpaid == 0.0 and first.z > 4.0
    assert len(first.examples) == 3 and max(first.examples) < 40
    assert all(phrase.text != "alpha" for phrase in rest)  # all have it: it pays nothing
    assert most_paid_phrases([], []) == []
