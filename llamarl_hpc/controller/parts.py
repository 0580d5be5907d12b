"""What the controller works with; made by `assemble.py`, replaced in tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamarl_hpc.channels.base import ControllerEnd
from llamarl_hpc.controller.ending import JobAround
from llamarl_hpc.controller.reference import ReferenceModels
from llamarl_hpc.controller.supervisor import Supervisor
from llamarl_hpc.observability.metrics_log import MetricsLog
from llamarl_hpc.observability.progress import Progress
from llamarl_hpc.observability.trace import Tracer
from llamarl_hpc.prompts.cursor import PromptCursor
from llamarl_hpc.prompts.dataset import PromptSet
from llamarl_hpc.storage.checkpoint import CheckpointStore
from llamarl_hpc.storage.rollout_store import RolloutWriter


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One attempt's."""

    channel: ControllerEnd
    supervisor: Supervisor
    cursor: PromptCursor
    heldout: PromptSet
    writer: RolloutWriter
    checkpoints: CheckpointStore
    references: ReferenceModels
    metrics: MetricsLog
    progress: Progress
    tracer: Tracer
    job: JobAround | None
    stop_file: Path
    checkpoint_s: float  # that a checkpoint is expected to take; 0 if nobody knows
