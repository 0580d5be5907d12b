"""What every block of the config is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A block of the config. Unknown keys are errors; values do not change after loading.

    Strict: `max_steps: true`, `save_steps: 1.5` and an unquoted `time: 12:30` (750 in YAML) are
    errors and not guesses.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
