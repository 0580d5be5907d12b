"""Every message that the controller and an executor's rank 0 can send each other.

One tagged struct per message; `ToExecutor` and `ToController` are the two closed unions that the
codec decodes. A message that is in neither is refused.
"""

from __future__ import annotations

import msgspec

from llamarl_hpc.types import (
    Array,
    GenerationRequest,
    GroupCompletions,
    Purpose,
    ReferenceItem,
    ReferenceLogprobs,
    TrainBatch,
)


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What all messages share: immutable, fields by name, the kind as a tag."""


# ---------------------------------------------------------------- controller -> executor


class Generate(_Message, frozen=True, tag="generate"):
    """To a generator: start these groups, in this order."""

    requests: list[GenerationRequest]


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One group to score: the prompt's text and data row, and the completions' texts."""

    purpose: Purpose
    group_id: int
    prompt: str
    columns: dict[str, object]
    completions: list[str]


class Score(_Message, frozen=True, tag="score"):
    """To the reward executor."""

    items: list[ScoreItem]


class Train(_Message, frozen=True, tag="train"):
    """To the trainer: make one optimizer step."""

    batch: TrainBatch


class Refer(_Message, frozen=True, tag="refer"):
    """To who holds the reference (trainer or reference executor): what does it say about these?"""

    step: int  # the reference is the policy after so many steps; 0: as it was at first
    temperature: float  # of the rollouts
    items: list[ReferenceItem]


class SaveReference(_Message, frozen=True, tag="save_reference"):
    """To the trainer: write the policy as it is after `step` steps to the model folder `folder`."""

    step: int
    folder: str


class LoadReference(_Message, frozen=True, tag="load_reference"):
    """To who holds the reference: from now on it is what lies in `folder`. Has no answer."""

    step: int
    folder: str


class SyncMember(msgspec.Struct, frozen=True, kw_only=True):
    """A generator replica in a weight group."""

    executor: str  # "generator.0"
    ranks: tuple[int, ...] = (0,)  # of the replica that fetch; the others share what these get


class PublishWeights(_Message, frozen=True, tag="publish_weights"):
    """To the trainer: offer the current weights as `version` to the members of `epoch`."""

    version: int
    epoch: int  # rises whenever the membership changes; names the process group
    members: list[SyncMember]


class ReceiveWeights(_Message, frozen=True, tag="receive_weights"):
    """To a generator: fetch `version`, verify it, use it for what starts from then on."""

    version: int
    epoch: int
    members: list[SyncMember]
    store_address: str = ""  # "host:port" of the collective transport's rendezvous; else empty


class SaveCheckpoint(_Message, frozen=True, tag="save_checkpoint"):
    """To the trainer: write optimizer and model state below `folder` (exists, empty)."""

    step: int
    folder: str


class Stop(_Message, frozen=True, tag="stop"):
    """To any executor: finish nothing more, leave cleanly with code 0."""

    reason: str


class Ping(_Message, frozen=True, tag="ping"):
    """To any executor, once per heartbeat interval: the controller is alive."""

    sequence: int


# ---------------------------------------------------------------- executor -> controller


class Hello(_Message, frozen=True, tag="hello"):
    """First message of an executor: all its ranks are up and its model is loaded."""

    executor: str  # "trainer", "generator.1", "reward"
    attempt: int
    host: str
    pids: list[int]  # by rank
    policy_version: int = 0  # of the weights it holds
    detail: dict[str, str] = {}


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """Sent by a background thread; `sequence` rises, wall clocks are never compared."""

    sequence: int
    activity: str = ""  # what the main loop is in: "decode", "train step 12", "idle", ...
    signal: str = ""  # "SIGTERM": a rank got it since the last heartbeat, and goes on


class Generated(_Message, frozen=True, tag="generated"):
    """Groups that are complete. `tokens` counts prompt tokens prefilled and tokens decoded."""

    groups: list[GroupCompletions]


class GroupScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one group. A component that does not apply to a completion is None."""

    purpose: Purpose
    group_id: int
    components: dict[str, list[float | None]]  # reward name -> one value per completion
    total: list[float]  # weighted sum of the components, None counted as 0
    error: str = ""  # why scoring failed (an exception); then every value is 0
    reasons: list[str] = []  # per completion: the limit that made it score 0; "" where none did
    t_start: float
    t_end: float


class Scored(_Message, frozen=True, tag="scored"):
    groups: list[GroupScores]


class Referred(_Message, frozen=True, tag="referred"):
    """The reference's log-probs of some groups."""

    step: int  # as asked
    groups: list[ReferenceLogprobs]
    seconds: float


class ReferenceSaved(_Message, frozen=True, tag="reference_saved"):
    step: int
    seconds: float


class Trained(_Message, frozen=True, tag="trained"):
    """One optimizer step is done; the policy version is now `version`."""

    step: int
    version: int
    metrics: dict[str, float]  # exact over all ranks and micro-batches, weighted by tokens
    logprobs: Array  # float32 [N], the trainer's, in the order of the batch's completion_ids
    entropy: Array | None = None  # float32 [N], only where the loss has an entropy bonus


class WeightsPublished(_Message, frozen=True, tag="weights_published"):
    """The trainer has handed over `version` and may go on training."""

    version: int
    epoch: int
    num_bytes: int
    seconds: float  # for which the trainer was kept from training


class WeightsSummed(_Message, frozen=True, tag="weights_summed"):
    """What every receiver of `version` must arrive at; "" with weight_sync.verify: off."""

    version: int
    epoch: int
    checksum: str
    sent_share: float = 1.0  # of the version's bytes that each receiver got; less by deltas


class WeightsReceived(_Message, frozen=True, tag="weights_received"):
    """A generator has verified `version` and now samples with it."""

    version: int
    epoch: int
    checksum: str
    seconds: float  # from the request to the switch


class WeightsRefused(_Message, frozen=True, tag="weights_refused"):
    """A generator could not fetch or verify `version` and goes on with what it has."""

    version: int
    epoch: int
    reason: str


class CheckpointCopied(_Message, frozen=True, tag="checkpoint_copied"):
    """Every rank holds a copy of what is to be saved: training may go on."""

    step: int
    seconds: float  # for which the trainer was kept from training


class CheckpointSaved(_Message, frozen=True, tag="checkpoint_saved"):
    """What all ranks had copied is on disk."""

    step: int
    folder: str
    seconds: float  # since the request


ToExecutor = (
    Generate
    | Score
    | Refer
    | Train
    | SaveReference
    | LoadReference
    | PublishWeights
    | ReceiveWeights
    | SaveCheckpoint
    | Stop
    | Ping
)
ToController = (
    Hello
    | Heartbeat
    | Generated
    | Scored
    | Referred
    | ReferenceSaved
    | Trained
    | WeightsPublished
    | WeightsSummed
    | WeightsReceived
    | WeightsRefused
    | CheckpointCopied
    | CheckpointSaved
)
