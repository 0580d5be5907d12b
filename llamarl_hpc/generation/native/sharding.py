"""Which part of every weight a rank of a replica keeps (Megatron-LM, arXiv:1909.08053, section 3).

    by rows       q, k, v (whole kv heads, with the query heads that read them), gate, up, lm_head
    by columns    o_proj, down_proj: every rank computes a summand of the layer's output
    whole         the embedding, norms, biases of what is cut by columns

Ranks need not keep equally much: 3 kv heads over 2 ranks are 1 and 2. The first ranks get the
smaller parts, because rank 0 samples as well. Of a tied model the embedding is kept whole, and
the output matrix is this rank's rows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from llamarl_hpc.errors import WeightSyncError
from llamarl_hpc.generation.native.architecture import Architecture
from llamarl_hpc.types import TensorPart

_ALIGNED = 8  # rows; where there are enough, cuts lie at multiples of it, as kernels like them

Span = tuple[int, int]  # [start, end)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank of `num_ranks` keeps of every layer."""

    rank: int
    num_ranks: int
    kv_heads: Span
    heads: Span  # of queries
    intermediate: Span
    vocabulary: Span

    @classmethod
    def of(cls, arch: Architecture, rank: int, num_ranks: int) -> Share:
        """Every rank gets a part of everything; `config.checks.check_replica` has seen to that."""
        assert 0 <= rank < num_ranks <= arch.num_kv_heads
        start, end = cut(arch.num_kv_heads, rank, num_ranks)
        group = arch.num_heads // arch.num_kv_heads
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            kv_heads=(start, end),
            heads=(start * group, end * group),
            intermediate=cut(arch.intermediate_size, rank, num_ranks),
            vocabulary=cut(arch.vocab_size, rank, num_ranks),
        )

    def apply(self, arch: Architecture) -> Architecture:
        """The sizes of what this rank computes."""
        return replace(
            arch,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.intermediate),
            vocab_size=_length(self.vocabulary),
        )


def cut(size: int, rank: int, num_ranks: int) -> Span:
    """Part `rank` of `size` rows, as even as it can be."""
    grain = _ALIGNED if size >= _ALIGNED * num_ranks else 1

    def bound(number: int) -> int:
        return size if number == num_ranks else number * size // num_ranks // grain * grain

    return bound(rank), bound(rank + 1)


def parts_of(arch: Architecture, share: Share) -> list[TensorPart]:
    """One for every weight of the model, those kept whole too; tied tensors once."""
    found = [_whole("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size)]
    for index in range(arch.num_layers):
        found += _layer(f"model.layers.{index}", arch, share)
    found.append(_whole("model.norm.weight", arch.hidden_size))
    if not arch.tied:
        shape = (arch.vocab_size, arch.hidden_size)
        found.append(_part("lm_head.weight", shape, share.vocabulary))
    return found


def part_of(tensor: Tensor, part: TensorPart) -> Tensor:
    """The part, of a tensor that came whole (a view of it) or as that part already.

    Raises WeightSyncError when it is neither.
    """
    shape = tuple(tensor.shape)
    if shape == part.part_shape:
        return tensor
    if shape != part.shape:
        raise WeightSyncError(f"{part.name} came as {list(shape)}, wanted {list(part.shape)}")
    return tensor.narrow(part.dim, part.start, part.end - part.start)


def _layer(name: str, arch: Architecture, share: Share) -> list[TensorPart]:
    attention, mlp, size, head = f"{name}.self_attn", f"{name}.mlp", arch.hidden_size, arch.head_dim
    found = [_whole(f"{name}.input_layernorm.weight", size)]
    found.append(_whole(f"{name}.post_attention_layernorm.weight", size))
    for which, heads, span in (
        ("q", arch.num_heads, share.heads),
        ("k", arch.num_kv_heads, share.kv_heads),
        ("v", arch.num_kv_heads, share.kv_heads),
    ):
        rows = (span[0] * head, span[1] * head)
        found += _rows(f"{attention}.{which}_proj", (heads * head, size), rows, arch.qkv_bias)
    if arch.qk_norm:
        found += [_whole(f"{attention}.{which}_norm.weight", head) for which in "qk"]
    for which in ("gate", "up"):
        shape = (arch.intermediate_size, size)
        found += _rows(f"{mlp}.{which}_proj", shape, share.intermediate, arch.mlp_bias)
    columns = (share.heads[0] * head, share.heads[1] * head)
    shape = (size, arch.num_heads * head)
    found += _columns(f"{attention}.o_proj", shape, columns, arch.output_bias)
    shape = (size, arch.intermediate_size)
    return found + _columns(f"{mlp}.down_proj", shape, share.intermediate, arch.mlp_bias)


def _rows(module: str, shape: tuple[int, int], span: Span, bias: bool) -> list[TensorPart]:
    found = [_part(f"{module}.weight", shape, span)]
    return [*found, _part(f"{module}.bias", shape[:1], span)] if bias else found


def _columns(module: str, shape: tuple[int, int], span: Span, bias: bool) -> list[TensorPart]:
    found = [_part(f"{module}.weight", shape, span, dim=1)]
    return [*found, _whole(f"{module}.bias", shape[0])] if bias else found


def _part(name: str, shape: tuple[int, ...], span: Span, *, dim: int = 0) -> TensorPart:
    return TensorPart(name=name, shape=shape, dim=dim, start=span[0], end=span[1])


def _whole(name: str, *shape: int) -> TensorPart:
    return _part(name, shape, (0, shape[0]))


def _length(span: Span) -> int:
    return span[1] - span[0]
