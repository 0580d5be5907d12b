"""Which prompt comes when: an endless walk over a prompt set, addressable by position.

Position t is prompt `order(t // n)[t % n]` of epoch `t // n`. The order of an epoch depends on
seed and epoch alone, so a resumed run, or any process, finds the same prompt for the same ticket.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from llamarl_hpc.errors import ConfigError
from llamarl_hpc.prompts.dataset import PromptSet
from llamarl_hpc.types import Array, Prompt


class PromptCursor:
    """The walk over `prompts`, in file order or shuffled anew in each epoch."""

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool = True) -> None:
        assert len(prompts) > 0, "load_prompts never gives an empty training set"
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.position = 0  # of the prompt that `next` gives

    def next(self) -> Prompt:
        """The next prompt; never ends."""
        prompt = self.prompt_at(self.position)
        self.position += 1
        return prompt

    def prompt_at(self, ticket: int) -> Prompt:
        """The prompt at position `ticket` (from 0), with its epoch. Moves nothing."""
        epoch, place = divmod(ticket, len(self.prompts))
        index = place
        if self.shuffle:
            index = int(epoch_order(len(self.prompts), self.seed, epoch)[place])
        return msgspec.structs.replace(self.prompts[index], epoch=epoch)

    def state(self) -> dict[str, Any]:
        """JSON: the position, and what it is a position in."""
        return {
            "position": self.position,
            "num_prompts": len(self.prompts),
            "fingerprint": self.prompts.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Raises ConfigError when the data or their order have changed."""
        if state["fingerprint"] != self.prompts.fingerprint:
            raise ConfigError(
                f"the training data have changed since the checkpoint: {state['num_prompts']} "
                f"prompts then, {len(self.prompts)} now, and not the same ones in the same order; "
                "bring the old data back or start a new run"
            )
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            raise ConfigError(
                f"data.seed and data.shuffle were {state['seed']} and {state['shuffle']} at the "
                f"checkpoint and are {self.seed} and {self.shuffle} now; set them back"
            )
        self.position = int(state["position"])


@lru_cache(maxsize=4)
def epoch_order(number: int, seed: int, epoch: int) -> Array:
    """A permutation of 0..number-1, int64, fixed by seed and epoch.

    Indices sorted by a hash of (seed, epoch, index): unlike a library's shuffle, it can never
    change with a version of numpy or Python in the middle of a run.
    """
    with np.errstate(over="ignore"):
        start = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
        keys = _mix(start + np.arange(number, dtype=np.uint64))
    order: Array = np.argsort(keys, kind="stable")
    return order


def _mix(x: Array) -> Array:
    """The SplitMix64 finaliser: every bit of the input moves every bit of the output."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
