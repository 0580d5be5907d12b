"""`llamarl-hpc export RUN --out DIR`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("export")(export)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="New folder for model and tokenizer.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint of this step; default: the newest.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The one with the highest accuracy (save_best).")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with LoRA: the adapter alone, for peft.")
    ] = False,
) -> None:
    """Write safetensors, tokenizer, chat template and generation config; transformers loads it."""
    from llamarl_hpc.config.load import load_config
    from llamarl_hpc.errors import ConfigError
    from llamarl_hpc.models.load import resolve_model, save_hf_folder
    from llamarl_hpc.run_dir import RunDir
    from llamarl_hpc.storage.checkpoint import CheckpointStore
    from llamarl_hpc.training.consolidate import checkpoint_adapters, checkpoint_tensors
    from llamarl_hpc.training.lora import save_adapter

    folder = RunDir.open(run)
    config = load_config(folder.config)
    store = CheckpointStore(folder, config.trainer.save_total_limit)
    if best:
        if step is not None:
            raise ConfigError("--best and --step name two checkpoints; leave one of them out")
        found = store.best()
        if found is None:
            raise ConfigError(
                f"{folder.path} has no best checkpoint; runs with trainer.save_best keep one"
            )
        step = found["step"]
    checkpoint = store.find(step)
    model_folder = resolve_model(config.model.path)
    if adapter:
        lora, trained = checkpoint_adapters(checkpoint.path)
        save_adapter(trained, lora, str(model_folder), out)
    else:
        save_hf_folder(checkpoint_tensors(checkpoint.path, model_folder), model_folder, out)
    typer.echo(f"step {checkpoint.step} of {folder.path} -> {out}")
