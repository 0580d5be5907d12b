"""TRL's side of `llamarl-hpc bench train`: its GRPOTrainer, fed stored completions.

`rollout_func` is TRL's own way of generating elsewhere. It is called once before each optimizer
step, so it is also where this process waits for its turn; the clock runs from its return until
the optimizer has made its step. On-policy, without a reference model: TRL then makes no pass for
old log-probs, and a step is its cheapest one (forward with log-probs and entropy, loss, backward,
clipping, AdamW). Imported by TRL's process alone: trl need not be installed elsewhere.
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from llamarl_hpc.training.bench import task as bench_task
from llamarl_hpc.training.bench.parent import Parent, Stopwatch
from llamarl_hpc.training.bench.task import Measured, Ready, Task
from llamarl_hpc.training.resident import peak_bytes, resident_bytes


def serve(task: Task, parent: Parent) -> None:
    """Returns only when TRL's loop has come to its end, which is far away."""
    rounds = Rounds(task, parent)
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        trainer = GRPOTrainer(
            model=task.model,
            reward_funcs=stored_rewards,
            args=settings(task, folder),
            train_dataset=Dataset.from_dict({"prompt": [f"{p}" for p in range(task.prompts)]}),
            rollout_func=rounds.stored_completions,
            callbacks=[rounds],
        )
        trainer.train()


def settings(task: Task, folder: str) -> GRPOConfig:
    num_rows = task.prompts * task.completions
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        seed=0,
        learning_rate=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        temperature=1.0,
        num_generations=task.completions,
        max_completion_length=task.completion_tokens,
        per_device_train_batch_size=task.trl_rows,
        gradient_accumulation_steps=num_rows // task.trl_rows,
        gradient_checkpointing=task.trl_checkpointing,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        max_steps=1 << 20,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )


def stored_rewards(prompts: list[str], stored_reward: list[float], **_: Any) -> list[float]:
    """TRL hands over what `stored_completions` gave it beside the tokens."""
    return stored_reward


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Holds TRL's loop before each step, and measures the step."""

    def __init__(self, task: Task, parent: Parent) -> None:
        self._task, self._parent = task, parent
        self._imports_bytes = resident_bytes()
        self._is_first = True
        self._watch = Stopwatch()
        self._measured = (0.0, 0.0)

    def stored_completions(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """A `rollout_func`: `prompts` has each prompt's name as often as it has completions."""
        named, completions = bench_task.token_ids(self._task)
        numbers = [int(name) for name in prompts]
        assert numbers == sorted(numbers), "TRL keeps the order of the data set"
        answer = {
            "prompt_ids": [named[number].tolist() for number in numbers],
            "completion_ids": completions.tolist(),
            "logprobs": None,
            "stored_reward": bench_task.rewards(self._task),
        }
        if not self._is_first:
            self._parent.wait_for_go()
        self._watch = Stopwatch()
        return answer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._measured = self._watch.measured()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Comes after `on_step_end` of the same step, with its gradient norm."""
        if self._is_first:
            self._is_first = False
            self._parent.tell(Ready(imports_bytes=self._imports_bytes))
            return
        seconds, cpu_s = self._measured
        self._parent.tell(
            Measured(
                seconds=seconds,
                cpu_s=cpu_s,
                grad_norm=float(logs["grad_norm"]),
                peak_bytes=peak_bytes(),
            )
        )
