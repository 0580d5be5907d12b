"""A configuration in hand: look at it, change it, check it, start it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from llamarl_hpc.config.load import load_config, resolved_text
from llamarl_hpc.config.schema import Config
from llamarl_hpc.notebook.background import check_here, start_background
from llamarl_hpc.notebook.changes import Changes, as_overrides
from llamarl_hpc.notebook.run import Run
from llamarl_hpc.notebook.views import Text, html_details, html_rows


@dataclass(frozen=True, repr=False)
class Experiment:
    """A config file with changes, resolved and valid. Nothing has been started."""

    file: Path
    overrides: tuple[str, ...]  # KEY=VALUE
    config: Config

    @classmethod
    def load(cls, file: Path | str, changes: Changes = None, /, **blocks: Any) -> Experiment:
        """Read a YAML file. `changes` is `{"trainer.max_steps": 10}` or `["trainer.max_steps=10"]`;
        blocks can be given by name: `trainer={"max_steps": 10}`. Raises ConfigError."""
        overrides = (*as_overrides(changes), *as_overrides(blocks))
        path = Path(file)
        return cls(path, overrides, load_config(path, overrides))

    def with_(self, changes: Changes = None, /, **blocks: Any) -> Experiment:
        """Another one with further changes; this one stays as it is. Raises ConfigError."""
        return Experiment.load(self.file, [*self.overrides, *as_overrides(changes)], **blocks)

    @property
    def text(self) -> Text:
        """Every key with its value, as YAML."""
        return Text(resolved_text(self.config))

    # ------------------------------------------------------------------ before it starts

    def check(self) -> Text:
        """Check model, data, rewards and what Slurm is asked for, and say what was found. Starts
        nothing. Raises ConfigError."""
        from llamarl_hpc.launch.local import prepare

        prepared = prepare(self.config, elsewhere=True)
        return Text(
            "\n".join([f"model: {prepared.model_folder}", *prepared.prompts.skipped.sentences()])
        )

    def script(self, run_dir: Path | str | None = None) -> Text:
        """The batch script that `submit` would submit. Works on any machine. Raises ConfigError."""
        from llamarl_hpc.launch.submit import check_submittable, run_script

        folder = self._folder(run_dir)
        check_submittable(self.config, folder)
        return Text(run_script(self.config, folder))

    def _folder(self, run_dir: Path | str | None) -> Path:
        """RUN stands for the id that a new run will get."""
        default = Path(self.config.runs_dir) / self.config.name / "RUN"
        return Path(run_dir if run_dir is not None else default).absolute()

    # ------------------------------------------------------------------ starting

    def submit(self, run_dir: Path | str | None = None) -> Run:
        """Check everything, make the run folder and submit the run as one Slurm job. Raises
        ConfigError."""
        from llamarl_hpc.launch.local import prepare
        from llamarl_hpc.launch.new_job import submit_new_run
        from llamarl_hpc.launch.submit import check_submission

        check_submission(self.config, self._folder(run_dir))
        prepared = prepare(self.config, elsewhere=True)
        folder, _ = submit_new_run(prepared, None if run_dir is None else Path(run_dir))
        return Run(folder)

    def start(self, run_dir: Path | str | None = None) -> Run:
        """Check everything, make the run folder and start the run in the background of this
        machine, where it goes on without the notebook. Raises ConfigError."""
        from llamarl_hpc.launch.local import create_run

        prepared = check_here(self.config)
        folder = create_run(prepared, None if run_dir is None else Path(run_dir))
        start_background(folder)
        return Run(folder)

    # ------------------------------------------------------------------ in a cell

    def __repr__(self) -> str:
        changes = "".join(f", {text}" for text in self.overrides)
        return f"Experiment({self.config.name}: {self.file}{changes})"

    def _repr_html_(self) -> str:
        rows = ((name, escape(value)) for name, value in self._rows())
        return html_rows(rows, escape(self.config.name)) + html_details("every key", self.text)

    def _rows(self) -> Iterator[tuple[str, str]]:
        config = self.config
        yield "file", str(self.file)
        if self.overrides:
            yield "changed", ", ".join(self.overrides)
        yield "model", config.model.path
        tasks = ", ".join(dict.fromkeys(task.name for task in config.data.tasks or []))
        yield "questions", config.data.path or tasks
        rollout = config.rollout
        yield (
            "a step",
            f"{rollout.prompts_per_step} prompts x {rollout.num_generations} completions of at "
            f"most {rollout.max_completion_length} tokens",
        )
        yield (
            "learning",
            f"{config.algorithm.loss_type}, max_staleness {config.algorithm.max_staleness}, "
            f"{config.trainer.max_steps} steps at {config.trainer.learning_rate:g}",
        )
        yield "generators", f"{config.generator.replicas}"
