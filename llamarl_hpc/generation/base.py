"""What a generation engine offers to the generator executor, whichever engine it is.

The executor drives it in one loop: hand over new requests, call `step`, collect finished groups,
and switch weights between two steps. An engine does no messaging and knows no controller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from llamarl_hpc.types import GenerationRequest, GroupCompletions, TensorPart


class GenerationEngine(Protocol):
    policy_version: int  # of the weights that the next step samples with

    def submit(self, request: GenerationRequest) -> None:
        """Queue a group. Raises ConfigError when prompt and max_tokens cannot fit the context."""

    def step(self) -> list[GroupCompletions]:
        """Admit what fits, decode one token for every running sequence; groups now complete.

        Does nothing and returns [] when there is no work.
        """

    def pause_admission(self, paused: bool) -> None:
        """While paused, queued groups wait and running ones go on: how weights wait for a gap."""

    def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy in a complete set of weights; tokens sampled from now on carry `version`.

        Running sequences go on, and their spans then show both versions; whether their KV cache
        is kept or computed anew is the engine's setting.
        """

    def parts(self) -> list[TensorPart]:
        """Which part of every weight this rank keeps; `load_weights` takes these, or them whole."""

    @property
    def num_running(self) -> int:
        """Sequences being decoded."""

    @property
    def num_waiting(self) -> int:
        """Groups not started yet."""

    @property
    def tokens_processed(self) -> int:
        """Prompt tokens prefilled plus tokens decoded since the start; for tokens per second."""
