"""The trainer: one optimizer step per batch, over all ranks, with DeepSpeed ZeRO.

All ranks make the same calls in the same order. Only the leader has the batch; it is broadcast,
every rank packs the same plan and computes its own share. The loss is a sum over tokens whose
weights hold the global denominators, so DeepSpeed's averaging over ranks is undone by a factor.
Messages, weight transfer and the folder of a checkpoint are other people's business.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl_hpc.batching.packing import (
    MicroBatch,
    micro_batches_of_rank,
    rollouts_with_gradient,
    token_weights,
)
from llamarl_hpc.config.losses import LossSettings
from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError, LlamarlError
from llamarl_hpc.placement import World
from llamarl_hpc.storage.tensor_shards import Piece, ShardReader
from llamarl_hpc.training import zero, zero_state
from llamarl_hpc.training.device import own_device
from llamarl_hpc.training.flops import pass_flops
from llamarl_hpc.training.lora import Adapter, adapters_of
from llamarl_hpc.training.loss import micro_batch_loss
from llamarl_hpc.training.loss_sums import LossSums
from llamarl_hpc.training.memory import ModelShape
from llamarl_hpc.training.optimizer import build_optimizer, clip_gradients, learning_rate
from llamarl_hpc.training.policy import build_policy, forward_inputs
from llamarl_hpc.training.rng import rng_state, set_rng_state
from llamarl_hpc.training.snapshot import (
    FOLDER,
    FORMAT,
    Snapshot,
    SnapshotWriter,
    read_description,
    rng_file,
)
from llamarl_hpc.training.zero_state import Fragment
from llamarl_hpc.types import Array, ParameterSpec, TrainBatch

WEIGHT = "weight"  # beside the names of the moments: the float32 weights in a checkpoint
_SAVE_TIMEOUT_S = 3600.0
_MAX_REFUSED_STEPS = 3  # in a row, with a gradient that is not finite


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What came of a batch. On ranks other than the leader both fields are empty."""

    metrics: dict[str, float] = field(default_factory=dict)
    # float32 [N]; nan where a rollout was left out (trainer.skip_zero_advantage)
    logprobs: Array = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    entropy: Array | None = None  # float32 [N], only where the loss has an entropy bonus


class TrainerEngine:
    """A sharded policy and its optimizer. Implements `weight_sync.base.WeightSource`."""

    policy_version: int  # optimizer steps that were really applied

    def __init__(
        self, config: Config, world: World, model_folder: Path, *, device: str = "cpu"
    ) -> None:
        """Collective. `placement.init_process_group` must have been called by every rank."""
        self.policy_version = 0
        self._trainer, self._loss = config.trainer, LossSettings.of(config.algorithm)
        self._max_completion_length = config.rollout.max_completion_length
        self._world = world
        self._device = own_device(device, world)
        self._refused_steps = 0
        torch.use_deterministic_algorithms(self._trainer.deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        zero.import_deepspeed(self._device.type)  # before transformers does so, unprepared
        policy = build_policy(config, model_folder).to(self._device)
        self._shape = ModelShape.of(policy.causal_lm.config.to_dict())
        optimizer = build_optimizer(policy, self._trainer)
        self._engine = zero.start_engine(policy, optimizer, self._trainer, world, self._device)
        self._parameters, self._trained = policy.parameter_names(), policy.trained_names()
        self._lora = config.model.lora
        self._adapters: dict[str, Adapter] = {}
        self._find_adapters()

    # ------------------------------------------------------------------ training

    def train_step(self, batch: TrainBatch | None) -> TrainResult:
        """One optimizer step from the leader's `batch` (None elsewhere). Collective.

        A batch without any token to train, and a gradient that is not finite, change nothing:
        the version stays, `tokens/trained` is 0 or `steps_refused` is 1. Raises LlamarlError when
        the gradient was not finite three times in a row.
        """
        start = time.perf_counter()
        batch = self._world.bcast(batch)
        assert batch is not None, "the leader must have a batch"
        weights = token_weights(
            batch,
            aggregation=self._loss.aggregation,
            max_completion_length=self._max_completion_length,
        )
        needed = None
        if self._trainer.skip_zero_advantage:
            needed = rollouts_with_gradient(
                batch, weights, entropy_bonus=self._loss.pulls_everywhere
            )
        micro_batches = micro_batches_of_rank(
            batch,
            weights,
            needed=needed,
            rank=self._world.rank,
            num_ranks=self._world.size,
            micro_batch_tokens=self._trainer.micro_batch_tokens,
            share_prompt=self._trainer.share_prompt,
        )
        rate = learning_rate(self._trainer, self.policy_version)
        has_tokens = bool(weights.any())
        share = self._compute(micro_batches, batch.temperature, backward=has_tokens)
        grad_norm, applied = self._apply(rate) if has_tokens else (0.0, False)
        self._count_step(applied=applied, refused=has_tokens and not applied, norm=grad_norm)
        step_metrics = {
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "steps_refused": float(has_tokens and not applied),
            "micro_batches": float(len(micro_batches)),
        }
        return self._collect(share, batch, step_metrics, start)

    def _compute(
        self, micro_batches: list[MicroBatch], temperature: float, *, backward: bool
    ) -> _Share:
        """Forward (and backward) of this rank's micro-batches; gradients stay in the engine."""
        sums: LossSums | None = None
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        self._engine.train(backward)
        for i, micro_batch in enumerate(micro_batches, start=1):
            self._engine.set_gradient_accumulation_boundary(i == len(micro_batches))
            with torch.set_grad_enabled(backward):
                inputs = forward_inputs(micro_batch, temperature=temperature, device=self._device)
                logprobs_K, entropy_K = self._engine(**inputs)
                loss, figures = micro_batch_loss(
                    micro_batch, logprobs_K, entropy_K, settings=self._loss
                )
            if backward:
                self._engine.backward(loss * self._world.size)
            sums = figures if sums is None else sums + figures
            logprobs.append(logprobs_K.detach()[: len(micro_batch.flat_index)])
            if self._loss.entropy_coef > 0.0:
                entropies.append(entropy_K.detach()[: len(micro_batch.flat_index)])
            # What hangs on them would still be there while the next pass makes its own.
            del logprobs_K, entropy_K, loss
        assert sums is not None, "every rank has at least one micro-batch"
        return _Share(
            sums=LossSums(sums=sums.sums.cpu(), maxima=sums.maxima.cpu()),
            flat_index=np.concatenate([m.flat_index for m in micro_batches]),
            logprobs=torch.cat(logprobs).float().cpu().numpy(),
            entropy=torch.cat(entropies).float().cpu().numpy() if entropies else None,
            num_tokens=sum(m.num_tokens for m in micro_batches),
            num_padded=sum(m.token_ids.size for m in micro_batches),
            flops=sum(
                pass_flops(self._shape, m, lora=self._lora, backward=backward)
                for m in micro_batches
            ),
            peak_gib=_peak_memory_gib(self._device),
        )

    def _apply(self, rate: float) -> tuple[float, bool]:
        """Clip, step, forget the gradients. The norm before clipping, and whether it was done."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        if not zero.leaves_clipping_to_us(self._trainer):
            self._engine.step()
            return float(self._engine.get_global_grad_norm()), self._engine.was_step_applied()
        norm = clip_gradients(self._engine.optimizer, self._trainer.max_grad_norm)
        if not np.isfinite(norm):
            self._engine.zero_grad()
            return norm, False
        self._engine.step()
        return norm, True

    def _count_step(self, *, applied: bool, refused: bool, norm: float) -> None:
        self.policy_version += int(applied)
        self._find_adapters()
        self._refused_steps = self._refused_steps + 1 if refused else 0
        if self._refused_steps >= _MAX_REFUSED_STEPS:
            raise LlamarlError(
                f"the gradient was not finite {self._refused_steps} times in a row at policy "
                f"version {self.policy_version} (norm {norm}); the weights are unharmed: lower "
                "trainer.learning_rate or algorithm.rho and resume"
            )

    def _collect(
        self, share: _Share, batch: TrainBatch, step_metrics: dict[str, float], start: float
    ) -> TrainResult:
        """Bring all ranks' figures and log-probs to the leader."""
        shares = self._world.gather(share)
        if shares is None:
            return TrainResult()
        sums = shares[0].sums
        for other in shares[1:]:
            sums = sums + other.sums
        logprobs = np.full(len(batch.completion_ids), np.nan, dtype=np.float32)
        entropy = None if share.entropy is None else np.full_like(logprobs, np.nan)
        num_computed = sum(len(part.flat_index) for part in shares)
        for part in shares:
            logprobs[part.flat_index] = part.logprobs
            if entropy is not None:
                entropy[part.flat_index] = part.entropy
        num_tokens = sum(part.num_tokens for part in shares)
        seconds = time.perf_counter() - start
        tflops = sum(part.flops for part in shares) / len(shares) / seconds / 1e12
        peak = self._trainer.peak_tflops
        metrics = {
            **sums.metrics(),
            **step_metrics,
            "tokens/computed": float(num_tokens),
            "tokens/skipped_ratio": 1.0 - num_computed / len(logprobs),
            "tokens/padded": float(sum(part.num_padded for part in shares)),
            "time/train": seconds,
            "perf/tokens_per_second": num_tokens / seconds,
            "perf/tflops": tflops,
            **({"perf/mfu": tflops / peak} if peak is not None else {}),
            "perf/peak_memory_gib": max(part.peak_gib for part in shares),
        }
        return TrainResult(metrics=metrics, logprobs=logprobs, entropy=entropy)

    # ------------------------------------------------------------------ weights

    def parameter_specs(self) -> list[ParameterSpec]:
        """See WeightSource. Tied parameters once, under the first of their names."""
        return [
            ParameterSpec(
                name=name,
                shape=zero.full_shape(parameter),
                dtype=str(parameter.dtype).removeprefix("torch."),
            )
            for name, parameter in self._parameters.items()
        ]

    def owned_range(self, name: str) -> tuple[int, int] | None:
        """See WeightSource."""
        parameter = self._parameters[name]
        if not zero.is_partitioned(parameter):
            return None
        return zero.partition_range(parameter, self._world)

    def read(self, name: str, start: int, end: int) -> Tensor:
        """See WeightSource. With LoRA: of the merged weights."""
        elements = zero.local_elements(self._parameters[name], self._world, start, end)
        adapter = self._adapters.get(name)
        return elements if adapter is None else adapter.merge(elements, start, end)

    def _find_adapters(self) -> None:
        """Whole adapters on every rank, as they are now. Collective at stage 3."""
        if self._lora is None:
            return
        whole: dict[str, Tensor] = dict(self._trained)
        if self._trainer.zero_stage == 3:
            for name, parameter in self._trained.items():
                with zero.gathered(parameter) as tensor:
                    whole[name] = tensor.clone()
        self._adapters = adapters_of(whole, self._lora)

    def export_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on the CPU) of every parameter, one whole tensor in memory at a time.

        Collective: every rank must exhaust the iterator. Only the leader gets items. With LoRA:
        of the merged weights.
        """
        for name, parameter in self._parameters.items():
            with zero.gathered(parameter) as whole:
                copy = whole.detach().clone() if self._world.is_leader else None
            if copy is not None:
                if name in self._adapters:
                    flat = self._adapters[name].merge(copy.view(-1), 0, copy.numel())
                    copy = flat.view(copy.shape)
                yield name, copy.cpu()

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> Snapshot:
        """A copy of what this rank holds of weights, moments and random states."""
        fragments = self._fragments()
        if zero_state.is_replicated(self._engine):  # share out the writing
            fragments = [f.cut(self._world.rank, self._world.size) for f in fragments]
        pieces = []
        for fragment in fragments:
            state = zero_state.moments(self._engine, fragment)
            state[WEIGHT] = fragment.within(fragment.holder)
            for kind, values in state.items():
                copy = values.detach().to("cpu", torch.float32, copy=True).numpy()
                pieces.append(
                    Piece(array=f"{fragment.name}/{kind}", start=fragment.start, values=copy)
                )
        return Snapshot(pieces=pieces, rng=rng_state(), description=self._description())

    def save(self, folder: Path) -> None:
        """Write `folder`/zero: weights, moments, random states of every rank. Collective; returns
        when all of it is on disk. Raises StoreError when it cannot be written.
        """
        writer = SnapshotWriter(self._world, timeout_s=_SAVE_TIMEOUT_S)
        writer.begin(self.snapshot(), folder)
        writer.wait()
        self._world.barrier()

    def load(self, folder: Path) -> None:
        """Continue from what any number of ranks saved, at any ZeRO stage and dtype. Collective.

        Exactly, if ranks, stage and dtype are the same; up to rounding otherwise. Raises
        ConfigError when the checkpoint is of another model, StoreError when it is not whole.
        """
        zero_folder = folder / FOLDER
        description = read_description(zero_folder)
        _check_parameters(zero_folder, description["parameters"], self._shapes())
        reader = ShardReader(zero_folder, description["ranks"])
        self.policy_version = int(description["policy_version"])
        zero_state.prepare_moments(self._engine, self.policy_version)
        for fragment in self._fragments():
            state = zero_state.moments(self._engine, fragment)
            state[WEIGHT] = fragment.within(fragment.holder)
            values = np.empty(fragment.end - fragment.start, dtype=np.float32)
            for kind, tensor in state.items():
                reader.read(f"{fragment.name}/{kind}", fragment.start, values)
                tensor.copy_(torch.from_numpy(values))
        zero_state.spread(self._engine)
        self._find_adapters()
        states = rng_file(zero_folder, self._world.rank)
        if states.exists():  # a larger world than the one that saved has none for its last ranks
            set_rng_state(torch.load(states, weights_only=True))
        self._world.barrier()

    def _fragments(self) -> list[Fragment]:
        return zero_state.held_fragments(self._engine, self._trained, self._world)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(zero.full_shape(p)) for name, p in self._trained.items()}

    def _description(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "policy_version": self.policy_version,
            "ranks": self._world.size,
            "trainer.zero_stage": self._trainer.zero_stage,
            "trainer.dtype": self._trainer.dtype,
            "model.lora": None if self._lora is None else self._lora.model_dump(),
            "parameters": self._shapes(),
        }


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One rank's part of a step, on its way to the leader."""

    sums: LossSums
    flat_index: Array  # int64, into the batch's N
    logprobs: Array  # float32
    entropy: Array | None  # float32, where the loss needs it
    num_tokens: int
    num_padded: int
    flops: float
    peak_gib: float


# ---------------------------------------------------------------- small print


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30  # Linux: KiB


def _check_parameters(
    folder: Path, saved: dict[str, list[int]], ours: dict[str, list[int]]
) -> None:
    for name in sorted(saved.keys() | ours.keys()):
        if saved.get(name) != ours.get(name):
            raise ConfigError(
                f"the checkpoint {folder} holds {name} with shape {saved.get(name)} but this model "
                f"has {ours.get(name)}; resume with the model that the run was started with"
            )
