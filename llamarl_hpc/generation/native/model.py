"""The forward pass of a Llama-family decoder over one packed batch: decoding and prompts together.

Rows of the batch: first one row per running sequence (its newest token), then the tokens of new
prompts, one prompt after the other. Linear layers see all rows at once; attention is one call for
all decoding rows and one per prompt. Logits are computed only where a token is sampled.

A rank of a replica of several computes its share of the heads, of the MLP and of the vocabulary
(`sharding.py`); the outputs of attention and MLP are then sums over the ranks.

N rows, B running sequences, Q query heads, H kv heads, D head size, T tokens of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.generation.native.architecture import Architecture
from llamarl_hpc.generation.native.int8_linear import Int8Linear, with_scales
from llamarl_hpc.generation.native.kv_cache import KVCache
from llamarl_hpc.generation.native.linear import Destination, Linear, make_linear
from llamarl_hpc.generation.native.rotary import rotary_tables
from llamarl_hpc.generation.native.sharding import Share, part_of, parts_of
from llamarl_hpc.generation.native.tensor_parallel import Ranks
from llamarl_hpc.types import TensorPart

_BLOCK = 32  # queries that torch's CPU attention takes at a time


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """A prompt in the batch. Its first `shared` tokens are copied, not computed."""

    start: int  # rows start..end hold tokens shared..length
    end: int
    slot: int  # where its keys and values go
    length: int  # tokens of the prompt
    shared: int  # tokens whose keys and values lie in `source` already
    source: int  # slot to copy them from


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Input of one step. Plain numbers, because it travels to every rank of a replica."""

    token_ids: list[int]  # [N]
    positions: list[int]  # [N]
    num_decoding: int  # B; their slots are 0..B-1
    longest: int  # T that decoding attends over
    prompts: list[PromptRows]
    sampled_rows: list[int]  # rows to compute logits for


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What all layers need to know of a batch, on the device."""

    positions: Tensor  # int64 [N]
    decode_mask: Tensor | None  # [B, 1, 1, T], 0 or -inf; None if B = 0
    prompt_masks: list[Tensor | None]
    cos: Tensor  # [N, 1, D]
    sin: Tensor


@dataclass(frozen=True, kw_only=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class NativeModel:
    """Weights and forward pass. Weights are undefined until the first `load_weights`."""

    def __init__(
        self,
        architecture: Architecture,
        config: Any,
        *,
        share: Share,
        ranks: Ranks | None,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
    ) -> None:
        """`architecture`: of the whole model; `share`: what this rank keeps of it; `ranks`: how it
        meets the others, None if it keeps all. `int8`: the layers' matrices come quantised and
        stay so (`models/int8.py`)."""
        self._share, self._arch, self._ranks = share, share.apply(architecture), ranks
        self._dtype, self._device, self._int8 = dtype, device, int8
        self._destinations: dict[str, Destination] = {}
        self._layers = [self._make_layer(i) for i in range(architecture.num_layers)]
        size = architecture.hidden_size
        self._norm = self._vector("model.norm.weight", size)
        self._embedding = torch.empty(architecture.vocab_size, size, dtype=dtype, device=device)
        self._head = make_linear(
            {"lm_head": self._arch.vocab_size},
            size,
            dtype=dtype,
            device=device,
            shared=self._output_rows if architecture.tied else None,
        )
        self._destinations |= self._head.destinations()
        shape = tuple(self._embedding.shape)
        self._destinations["model.embed_tokens.weight"] = (shape, self._load_embedding)
        if architecture.tied:
            del self._destinations["lm_head.weight"]
        parts: Iterable[TensorPart] = parts_of(architecture, share)
        self.parts = {part.name: part for part in (with_scales(parts) if int8 else parts)}
        kept = {name: shape for name, (shape, _) in self._destinations.items()}
        assert kept == {name: part.part_shape for name, part in self.parts.items()}
        self._cos, self._sin = rotary_tables(config, max_context, dtype, device)

    @property
    def _output_rows(self) -> Tensor:
        """A tied model's output matrix on this rank: a view of the embedding."""
        start, end = self._share.vocabulary
        return self._embedding[start:end]

    def _make_layer(self, index: int) -> _Layer:
        arch, name = self._arch, f"model.layers.{index}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        size, queries = arch.hidden_size, arch.num_heads * arch.head_dim
        keys = arch.num_kv_heads * arch.head_dim
        qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        gate_up = dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), arch.intermediate_size)

        def head_norm(which: str) -> Tensor | None:
            if not arch.qk_norm:
                return None
            return self._vector(f"{attention}.{which}_norm.weight", arch.head_dim)

        return _Layer(
            input_norm=self._vector(f"{name}.input_layernorm.weight", size),
            qkv=self._linear(
                {f"{attention}.{part}": rows for part, rows in qkv.items()}, size, arch.qkv_bias
            ),
            q_norm=head_norm("q"),
            k_norm=head_norm("k"),
            output=self._summand(f"{attention}.o_proj", queries, arch.output_bias),
            mlp_norm=self._vector(f"{name}.post_attention_layernorm.weight", size),
            gate_up=self._linear(gate_up, size, arch.mlp_bias),
            down=self._summand(f"{mlp}.down_proj", arch.intermediate_size, arch.mlp_bias),
        )

    def _summand(self, module: str, inputs: int, bias: bool) -> Linear:
        """A layer whose outputs the ranks add up; the bias is rank 0's to add."""
        size, is_first = self._arch.hidden_size, self._share.rank == 0
        if bias and not is_first:
            self._destinations[f"{module}.bias"] = ((size,), lambda tensor: None)
        return self._linear({module: size}, inputs, bias and is_first)

    def _linear(self, outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        make = Int8Linear if self._int8 else make_linear
        layer: Linear = make(outputs, inputs, bias=bias, dtype=self._dtype, device=self._device)
        self._destinations |= layer.destinations()
        return layer

    def _vector(self, name: str, size: int) -> Tensor:
        vector = torch.empty(size, dtype=self._dtype, device=self._device)
        self._destinations[name] = ((size,), vector.copy_)
        return vector

    def _load_embedding(self, tensor: Tensor) -> None:
        self._embedding.copy_(tensor)
        if self._arch.tied:
            ((_, load_head),) = self._head.destinations().values()
            load_head(self._output_rows)

    # ------------------------------------------------------------------ weights

    @torch.no_grad()  # not inference_mode: the iterator's own tensors must stay ordinary ones
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy in a complete set. Raises WeightSyncError for a wrong name or shape, or a gap.

        Each may come whole, or as the part that this rank keeps (`parts`). The output matrix of a
        tied model may come or not; it is the embedding either way.
        """
        missing = dict.fromkeys(self._destinations)
        for name, tensor in tensors:
            if name == "lm_head.weight" and self._arch.tied:
                continue
            if name not in self._destinations:
                raise WeightSyncError(f"the generator's model has no weight {name}")
            _, load = self._destinations[name]
            load(part_of(tensor, self.parts[name]))
            missing.pop(name, None)
        if missing:
            first = next(iter(missing))
            raise WeightSyncError(f"{len(missing)} weights did not come, the first is {first}")

    # ------------------------------------------------------------------ forward

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, cache: KVCache) -> Tensor | None:
        """Logits [rows of batch.sampled_rows, vocabulary]; writes the rows' keys and values.

        Of a replica of several ranks all call this with the same batch, and only the leader gets
        logits.
        """
        token_ids, positions = self._tensor(batch.token_ids), self._tensor(batch.positions)
        if len(token_ids) == 1:  # a one-row product may round otherwise than a row among several
            token_ids, positions = token_ids.expand(2), positions.expand(2)
        x = self._embedding[token_ids]
        rows = _Rows(
            positions=positions,
            decode_mask=self._decode_mask(batch, positions),
            prompt_masks=[_prompt_mask(prompt, x) for prompt in batch.prompts],
            cos=self._cos[positions].unsqueeze(1),
            sin=self._sin[positions].unsqueeze(1),
        )
        eps, shape = self._arch.norm_eps, (self._arch.hidden_size,)
        for index, layer in enumerate(self._layers):
            h = rms_norm(x, shape, layer.input_norm, eps)
            q, k, v = self._project(layer, h, rows)
            attended = self._attend(q, k, v, cache.layer(index), batch, rows)
            x = x + self._sum(layer.output(attended))
            gate, up = layer.gate_up(rms_norm(x, shape, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = x + self._sum(layer.down(silu(gate).mul_(up)))
        sampled = self._tensor(batch.sampled_rows)
        last = x[sampled.expand(2) if len(sampled) == 1 else sampled]
        logits = self._head(rms_norm(last, shape, self._norm, eps))[: len(sampled)]
        return logits if self._ranks is None else self._ranks.gather_logits(logits)

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self._device)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._ranks is None else self._ranks.sum_over_ranks(x)

    def _decode_mask(self, batch: PackedBatch, positions: Tensor) -> Tensor | None:
        """[B, 1, 1, longest]: 0 up to and including a row's own position, else -inf."""
        if not batch.num_decoding:
            return None
        last = positions[: batch.num_decoding].unsqueeze(1)
        hidden = torch.arange(batch.longest, device=self._device) > last
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]

    def _project(self, layer: _Layer, h: Tensor, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, Q, D], rotated keys [N, H, D], values [N, H, D]."""
        arch = self._arch
        heads = layer.qkv(h).view(len(h), -1, arch.head_dim)
        rotated = arch.num_heads + arch.num_kv_heads
        qk, v = heads[:, :rotated], heads[:, rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            shape = (arch.head_dim,)
            q = rms_norm(qk[:, : arch.num_heads], shape, layer.q_norm, arch.norm_eps)
            k = rms_norm(qk[:, arch.num_heads :], shape, layer.k_norm, arch.norm_eps)
            qk = torch.cat((q, k), dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = qk * rows.cos + torch.cat((-second, first), dim=-1) * rows.sin
        return qk[:, : arch.num_heads], qk[:, arch.num_heads :], v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cached: tuple[Tensor, Tensor],
        batch: PackedBatch,
        rows: _Rows,
    ) -> Tensor:
        """Attention output [N, Q * D]; keys and values go into the cache on the way."""
        keys, values = cached
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        num = batch.num_decoding
        if num:
            slots = torch.arange(num, device=q.device)
            keys[slots, rows.positions[:num]] = k[:num]
            values[slots, rows.positions[:num]] = v[:num]
            grouped = q[:num].reshape(num, keys.shape[2], -1, q.shape[2])
            out[:num] = scaled_dot_product_attention(
                grouped,
                keys[:num, : batch.longest].transpose(1, 2),
                values[:num, : batch.longest].transpose(1, 2),
                attn_mask=rows.decode_mask,
            ).view(num, -1)
        for prompt, mask in zip(batch.prompts, rows.prompt_masks, strict=True):
            mine = slice(prompt.start, prompt.end)
            for cache, new in ((keys, k), (values, v)):
                cache[prompt.slot, : prompt.shared] = cache[prompt.source, : prompt.shared]
                cache[prompt.slot, prompt.shared : prompt.length] = new[mine]
            seen = _full_blocks(prompt.length)
            out[mine] = _attend_prompt(
                q[mine], keys[prompt.slot, :seen], values[prompt.slot, :seen], mask
            )
        if len(q) > len(batch.token_ids):
            out[1] = out[0]  # the row that only fills up
        return out


def _attend_prompt(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of one prompt's rows [n, Q, D] over keys [T, H, D] -> [n, Q * D].

    Kernels work in blocks and compute a small block otherwise than a full one. Rows and keys are
    filled up to full blocks (what is beyond the prompt is masked), so that a row's result does not
    depend on the prompt's length, nor on how much of it was shared.
    """
    own, heads, size = q.shape
    num = _full_blocks(own)
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, num - own))
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = q.view(num, kv_heads, group, size).permute(1, 2, 0, 3)  # [H, Q/H, n, D]
    shared = (kv_heads, group, keys.shape[0], size)
    out = scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(1).expand(shared),
        values.transpose(0, 1).unsqueeze(1).expand(shared),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3)[:own].reshape(own, heads * size)


def _full_blocks(num: int) -> int:
    return -(-num // _BLOCK) * _BLOCK


def _prompt_mask(rows: PromptRows, like: Tensor) -> Tensor | None:
    """None for plain causal attention; else row i sees the `shared` tokens and its own up to i."""
    if rows.shared == 0:
        return None
    shape = (_full_blocks(rows.length - rows.shared), _full_blocks(rows.length))
    mask = torch.full(shape, -torch.inf, dtype=like.dtype, device=like.device)
    return mask.triu_(rows.shared + 1)
