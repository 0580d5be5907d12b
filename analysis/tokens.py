"""Tokens as pieces of text, and how far each was off-policy: for people to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.read_run import Run
from analysis.stored_rollout import StoredRollout

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# |log(ratio)| above which a token is coloured weakly, clearly, strongly.
_LEVELS = (math.log(1.05), math.log(1.25), math.log(2.0))


# What a terminal would obey instead of show, as pictures: no completion steers the screen.
_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
_PICTURES |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)
_PICTURES |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)  # direction


def visible(text: str) -> str:
    """`text` with its control characters made visible; line breaks and tabs stay."""
    return text.translate(_PICTURES)


def ratio_level(ratio: float) -> int:
    """-3..3: how much less (-) or more (+) likely the token was under the trainer; 0 if alike."""
    if not ratio > 0:  # NaN: never trained
        return 0
    size = sum(abs(math.log(ratio)) > limit for limit in _LEVELS)
    return size if ratio > 1 else -size


def load_tokenizer(run: Run) -> Tokenizer | None:
    """The run's tokenizer, if its tokenizer.json is still where the run found it."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    folders: list[Any] = [run.dir.path, run.info.get("model_folder")]
    folders.append((run.config.get("model") or {}).get("path"))
    for folder in folders:
        path = Path(str(folder)) / "tokenizer.json"
        if folder and path.is_file():
            return Tokenizer.from_file(str(path))
    return None


_MAX_SPREAD = 4  # tokens of one character, which has so many bytes in UTF-8


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One piece per token, which joined are the decoded whole; special tokens included.

    A character whose bytes are spread over several tokens stands at the last of them.
    """
    pieces: list[str] = []
    start = done = 0  # decoding begins a token early: some decoders treat the first differently
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:done], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end < len(ids) and end - done < _MAX_SPREAD:
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, done = done, end
    return pieces


def coloured_pieces(tokenizer: Tokenizer | None, rollout: StoredRollout) -> list[tuple[str, int]]:
    """(text, level) along a completion; the whole text at level 0 without a tokenizer."""
    if tokenizer is None:
        return [(rollout.text, 0)]
    texts = token_texts(tokenizer, rollout.token_ids.tolist())
    levels = [ratio_level(float(value)) for value in rollout.ratio]
    return list(zip(texts, levels, strict=True))
