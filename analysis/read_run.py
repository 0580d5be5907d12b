"""A run folder, read: rollouts, metrics, spans. While the run goes on, or years later.

    run = Run.open("runs/quickstart")
    run.rollouts(status="trained", text=True)   pandas, one row per completion
    run.table("rollouts", ["reward", "step"])   the same as numpy columns, without pandas
    run.rollout(4294967296)                     one completion with its tokens
    run.metrics(), run.evaluations(), run.spans(), run.attempts

Everything is read when it is asked for. After a resume, rows that a later attempt did not build on
are left out (`analysis/lineage.py`); `lineage="all"` shows them too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from analysis.current_groups import current_groups
from analysis.lineage import Attempt, current_events, current_metrics
from analysis.statistics import wilson_interval
from analysis.stored_rollout import NAMES, StoredRollout, stored_rollout
from llamarl_hpc.errors import ConfigError, RunDirError
from llamarl_hpc.observability.json_lines import read_json_lines
from llamarl_hpc.observability.trace import Span, read_spans
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage.rollout_store.file import DamagedFileError
from llamarl_hpc.storage.rollout_store.layout import COLUMNS, ENUMS, Block
from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.types import Array

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

T = TypeVar("T")
Lineage = Literal["current", "all"]
_GROUP_KEYS = ("purpose", "group_id", "attempt", "issue", "status", "step", "t_resolved")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One measurement of held-out accuracy."""

    policy_version: int
    time: float  # Unix, when it was complete
    num_prompts: int
    num_correct: float  # sum over prompts of the share of right completions
    seconds: float  # it took
    num_generations: int = 1

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(self.num_prompts, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, Wilson."""
        return wilson_interval(self.num_correct, self.num_prompts)


class Run:
    """Lazy handle on a run folder. A snapshot of the rollouts; `refresh` sees what came since."""

    def __init__(self, folder: RunDir) -> None:
        self.dir = folder

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Raises RunDirError when `path` is no run folder (nor a folder of runs)."""
        return cls(RunDir.open(path))

    def refresh(self) -> None:
        """Read anew what has been read."""
        for name in ("store", "info", "config", "_current", "lines"):
            self.__dict__.pop(name, None)

    def without_damage(self, work: Callable[[Run], T]) -> T:
        """`work(self)`, again without the file that turned out to be damaged, until it is through.

        `store.problems` then names what was left out. Masks from before do not fit any more.
        """
        while True:
            try:
                return work(self)
            except DamagedFileError as error:
                mine = error.folder == self.dir.rollouts
                if not mine or error.file_name not in self.store.file_names:
                    raise
                self.store.leave_out(error)
                self.__dict__.pop("_current", None)

    # ------------------------------------------------------------ what the run is

    @cached_property
    def info(self) -> dict[str, Any]:
        """run.json; empty when it is not there."""
        return self.dir.read_info()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml as plain values; empty when it cannot be read, which `verify` tells."""
        try:
            return self.dir.read_config()
        except RunDirError:
            return {}

    @property
    def attempts(self) -> list[Attempt]:
        return [Attempt.from_info(entry) for entry in self.info.get("attempts", [])]

    @property
    def has_ended(self) -> bool:
        """The last attempt ended by itself; False while it runs and after a kill."""
        attempts = self.attempts
        return bool(attempts) and attempts[-1].ended is not None

    # ------------------------------------------------------------ rollouts as columns

    @cached_property
    def store(self) -> RolloutReader:
        return RolloutReader(self.dir.rollouts)

    @property
    def reward_names(self) -> list[str]:
        return self.store.reward_names

    @cached_property
    def _current(self) -> Array:
        return current_groups(self.store.columns("groups", _GROUP_KEYS), self.attempts)

    def group_mask(
        self,
        *,
        lineage: Lineage = "current",
        purpose: str | None = None,
        status: str | None = None,
        steps: tuple[int, int] | None = None,
        prompt: str | None = None,
    ) -> Array:
        """bool [G]: the groups that fit. `steps` is (first, last), both included; `prompt` a
        prompt_id or how it begins."""
        mask = np.ones(self.store.num_rows("groups"), dtype=bool)
        if lineage == "current":
            mask &= self._current
        for kind, wanted in (("purpose", purpose), ("status", status)):
            if wanted is not None:
                mask &= self.store.column(f"groups/{kind}") == _code(kind, wanted)
        if steps is not None:
            step = self.store.column("groups/step")
            mask &= (steps[0] <= step) & (step <= steps[1])
        if prompt is not None:
            ids = self.store.column("prompts/prompt_id")
            mask &= np.char.startswith(ids, prompt.encode())[self.store.column("groups/prompt")]
        return mask

    def rollout_mask(self, *, reward: tuple[float, float] | None = None, **filters: Any) -> Array:
        """bool [R]: the completions that fit: of groups that fit (`group_mask`), with a `reward`
        between (least, most), both included."""
        mask: Array = self.group_mask(**filters)[self.store.column("rollouts/group")]
        if reward is not None:
            values = self.store.column("rollouts/reward")
            mask &= (reward[0] <= values) & (values <= reward[1])
        return mask

    def table(
        self,
        table: Literal["groups", "rollouts"],
        names: Sequence[str],
        mask: Array | None = None,
    ) -> Block:
        """Columns as numpy; reward components as `rewards/<name>`.

        `mask` is a `group_mask`; by default that of the current lineage. Enumerations are codes,
        names of generators and reasons row numbers: `decoded` turns them into text.
        """
        rows = self.group_mask() if mask is None else mask
        if table == "rollouts":
            rows = rows[self.store.column("rollouts/group")]
        return self._block(table, names, rows)

    def _block(self, table: str, names: Sequence[str], rows: Array) -> Block:
        block = {}
        for name in names:
            path = name if name.startswith("rewards/") else f"{table}/{name}"
            block[name] = self.store.column(path)[rows]
        return block

    def decoded(self, name: str, values: Array) -> list[str]:
        """Text of purpose, status, finish_reason, generator, reason or prompt_id (of `prompt`)."""
        if name in NAMES:
            return [NAMES[name][int(code)] for code in values]
        path = {
            "generator": "generators/name",
            "reason": "reasons/text",
            "prompt": "prompts/prompt_id",
        }[name]
        texts = self.store.column(path)
        return [bytes(texts[row]).decode("utf-8", errors="replace") for row in values]

    # ------------------------------------------------------------ rollouts as pandas

    def groups(self, **filters: Any) -> pd.DataFrame:
        """One row per group; keyword arguments as in `group_mask`. Damaged files are left out."""
        return self.without_damage(lambda run: run._frame("groups", run.group_mask(**filters)))

    def rollouts(self, *, text: bool = False, **filters: Any) -> pd.DataFrame:
        """One row per completion; `text` adds the texts of prompt and completion. Keyword arguments
        as in `rollout_mask`. Damaged files are left out: `store.problems` says which."""
        return self.without_damage(lambda run: run._rollouts(text=text, **filters))

    def _rollouts(self, *, text: bool, **filters: Any) -> pd.DataFrame:
        mask = self.rollout_mask(**filters)
        frame = self._frame("rollouts", mask)
        prompts = self.store.columns("prompts", ("prompt_id", "epoch", "token_length"))
        rows = frame["prompt"].to_numpy()
        frame["prompt_id"] = self.decoded("prompt", rows)
        frame["epoch"] = prompts["epoch"][rows]
        frame["prompt_length"] = prompts["token_length"][rows]
        for name in self.reward_names:
            path = f"rewards/{name}"
            frame[path] = self._block("rollouts", [path], mask)[path]
        if text:
            texts = self.store.texts
            frame["prompt"] = texts("prompts/text", "prompt_text/utf8", rows)
            frame["completion"] = texts("rollouts/text", "text/utf8", frame.index.to_numpy())
        return frame.reset_index(drop=True)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """The same as `rollouts`."""
        return self.rollouts(**options)

    def to_arrow(self, *, text: bool = True, tokens: bool = False, **filters: Any) -> pa.Table:
        """One row per completion; `tokens` adds ids, log-probs and the loss mask as lists. Keyword
        arguments as in `rollout_mask`."""
        from analysis.export import to_arrow

        return self.without_damage(lambda run: to_arrow(run, text=text, tokens=tokens, **filters))

    def to_polars(self, **options: Any) -> Any:
        """`to_arrow` as a polars frame. Raises ConfigError when polars is not installed."""
        try:
            polars = import_module("polars")
        except ImportError:
            raise ConfigError(
                "to_polars needs polars, which is not installed: pip install polars"
            ) from None
        return polars.from_arrow(self.to_arrow(**options))

    def _frame(self, table: Literal["groups", "rollouts"], rows: Array) -> pd.DataFrame:
        import pandas as pd

        names = [column.name for column in COLUMNS.values() if column.table == table]
        block = self._block(table, names, rows)
        frame = pd.DataFrame(block, index=np.flatnonzero(rows))
        for name in ("purpose", "status", "finish_reason", "generator", "reason"):
            if name in frame:
                frame[name] = pd.Categorical(self.decoded(name, block[name]))
        hidden = [name for name in names if name.endswith("offset") or name == "first_rollout"]
        return frame.drop(columns=hidden)

    def prompt_columns(self, rows: Array) -> list[dict[str, Any]]:
        """Of prompts, by row number (as in the column `prompt` of `table`): what their row of the
        data file held beside the prompt."""
        texts = self.store.texts("prompts/columns", "prompt_columns/utf8", rows)
        return [json.loads(text or "{}") for text in texts]

    # ------------------------------------------------------------ one rollout

    def rollout(self, rollout_id: int) -> StoredRollout:
        """One completion by its id. Raises KeyError."""
        return self.rollout_at(self.store.find_rollout(rollout_id))

    def rollout_at(self, row: int) -> StoredRollout:
        """One completion by its row in the table `rollouts` (of all attempts)."""
        return stored_rollout(self.store, row)

    # ------------------------------------------------------------ metrics and spans

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All of metrics.jsonl, of all attempts."""
        return read_json_lines(self.dir.metrics)

    def metric_rows(self) -> list[dict[str, Any]]:
        """One dictionary per optimizer step of the current lineage."""
        return current_metrics(self.lines, self.attempts)

    def metrics(self) -> pd.DataFrame:
        """The same as a table, indexed by step."""
        import pandas as pd

        rows = self.metric_rows()
        return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()

    def evaluations(self) -> list[Evaluation]:
        """Held-out accuracy by policy version, of the current lineage."""
        return [
            _evaluation(row)
            for row in current_events(self.lines, self.attempts, "eval")
            if row.get("eval/heldout/num_prompts")
        ]

    def spans(self, attempt: int | None = None) -> list[Span]:
        """What the executors did, by start; of one attempt or of all."""
        suffix = "*" if attempt is None else f"*.{attempt}"
        return read_spans(sorted(self.dir.trace.glob(f"{suffix}.jsonl")))


def _code(kind: str, name: str) -> int:
    if name not in ENUMS[kind]:
        raise ConfigError(f"{kind} is one of {', '.join(ENUMS[kind])}; got {name!r}")
    return ENUMS[kind][name]


def _evaluation(row: dict[str, Any]) -> Evaluation:
    total = int(row["eval/heldout/num_prompts"])
    key = next((key for key in row if key.startswith("eval/heldout/avg@")), "")
    correct = row.get("eval/heldout/num_correct")
    if correct is None:
        correct = float(row.get(key) or 0.0) * total
    return Evaluation(
        policy_version=row["policy_version"],
        time=float(row.get("time", 0.0)),
        num_prompts=total,
        num_correct=float(correct),
        seconds=float(row.get("eval/heldout/seconds") or 0.0),
        num_generations=int(key.rpartition("@")[2] or 1),
    )
