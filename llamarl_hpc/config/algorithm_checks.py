"""Rules of block `algorithm`: which keys a loss has, what they may be, and which would do nothing.

A key that has no effect is an error: whoever wrote it believes that it has one. Keys of the KL term
are not among them, so that `algorithm.beta: 0` alone switches it off.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamarl_hpc.config.losses import PRESETS, LossSettings
from llamarl_hpc.config.schema import AlgorithmConfig, Config

_OF_CLIP = ("epsilon", "epsilon_high", "delta")
_OF_CORRECTION = ("mismatch_level", "mismatch_min", "mismatch_max")


def algorithm_sentences(config: Config) -> Iterator[str]:
    """One sentence for each contradiction."""
    algorithm = config.algorithm
    if algorithm.in_flight_weight_updates and algorithm.max_staleness == 0:
        yield (
            "algorithm.in_flight_weight_updates is true but algorithm.max_staleness 0 forbids "
            "completions of mixed versions; set max_staleness to 1 or more"
        )
    longest = config.rollout.max_completion_length
    if algorithm.overlong_buffer > longest:
        yield (
            f"algorithm.overlong_buffer is {algorithm.overlong_buffer} but completions have at "
            f"most {longest} tokens (rollout.max_completion_length); set it to {longest} or less"
        )
    if _is_set(algorithm, "overlong_penalty") and algorithm.overlong_buffer == 0:
        yield (
            f"algorithm.overlong_penalty is {algorithm.overlong_penalty:g} but "
            "algorithm.overlong_buffer is 0, so nothing is taken off; set algorithm.overlong_buffer"
        )
    yield from _bounds(algorithm)
    yield from _mismatch(algorithm)
    yield from _reference(config)
    if algorithm.dynamic_sampling and algorithm.advantage == "reinforce_pp":
        yield (
            "algorithm.dynamic_sampling replaces groups whose completions do not differ, but "
            "algorithm.advantage 'reinforce_pp' does not compare within groups; use another one"
        )
    if algorithm.max_resamples is not None and not algorithm.dynamic_sampling:
        yield (
            f"algorithm.max_resamples is {algorithm.max_resamples} but algorithm.dynamic_sampling "
            "is false; set both or neither"
        )
    if algorithm.max_resamples == 0 and algorithm.dynamic_sampling:
        yield (
            "algorithm.dynamic_sampling is true but algorithm.max_resamples is 0, so no group is "
            "replaced; raise it or leave it out"
        )


def _is_set(algorithm: AlgorithmConfig, key: str) -> bool:
    """To something else than its default, which is also what stands in the copy of a run."""
    return bool(getattr(algorithm, key) != AlgorithmConfig.model_fields[key].default)


def _reference(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.beta > 0.0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator 'k1' in the loss has a gradient that is 0 on average, so it "
            "would hold nothing back; use k2 or k3, or algorithm.kl_in 'reward'"
        )
    tokens, longest = config.reference.micro_batch_tokens, _row_tokens(config)
    if tokens is not None and tokens < longest:
        yield (
            f"reference.micro_batch_tokens is {tokens} but one row can have {longest} tokens "
            f"(rollout.max_prompt_length + max_completion_length); raise it to {longest} or more"
        )


def _row_tokens(config: Config) -> int:
    return config.rollout.max_prompt_length + config.rollout.max_completion_length


def _bounds(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Keys of the importance ratio: which of them a loss has, and what they may be."""
    kind, preset = algorithm.loss_type, PRESETS[algorithm.loss_type]
    has_rho = preset.bounded_by == "rho" or preset.is_decoupled
    if has_rho and algorithm.rho < 1.0:
        yield (
            f"algorithm.rho is {algorithm.rho}, which would shrink even on-policy gradients "
            "(weight 1); set it to 1 or more (2 to 10 is usual)"
        )
    settings = LossSettings.of(algorithm)
    is_clip = preset.surrogate == "clipped_ratio"
    without_effect = {
        "rho": not has_rho,
        "epsilon": preset.bounded_by != "epsilon",
        "epsilon_high": preset.bounded_by != "epsilon",
        "delta": not is_clip,
        "importance_sampling_level": preset.surrogate == "score",
    }
    for key, is_without in without_effect.items():
        if is_without and _is_set(algorithm, key):
            yield f"algorithm.{key} means nothing to algorithm.loss_type '{kind}'; remove it"
    if settings.low < 0.0 or (is_clip and settings.low == 0.0):
        yield (
            f"algorithm.epsilon is {algorithm.epsilon}, so the lower clip 1 - epsilon would not "
            f"be positive; set it below 1{'' if is_clip else ', or to 1 for no lower clip'}"
        )
    if is_clip and settings.delta <= settings.high:
        yield (
            f"algorithm.delta is {algorithm.delta:g} but ratios up to {settings.high:g} (1 + "
            "algorithm.epsilon_high) are within the clip; set delta above that (3 is usual)"
        )


def _mismatch(algorithm: AlgorithmConfig) -> Iterator[str]:
    preset, kind = PRESETS[algorithm.loss_type], algorithm.mismatch_correction
    for key in _OF_CORRECTION:
        if kind == "none" and _is_set(algorithm, key):
            yield (
                f"algorithm.{key} is {getattr(algorithm, key)} but algorithm.mismatch_correction "
                f"is 'none'; set mismatch_correction to truncate or mask, or remove {key}"
            )
    if kind == "truncate":
        keys = ["mismatch_min", *(_OF_CLIP if preset.surrogate == "clipped_ratio" else ())]
        for key in keys:
            if _is_set(algorithm, key):
                yield (
                    f"algorithm.{key} means nothing beside algorithm.mismatch_correction "
                    "'truncate', which leaves the loss a ratio of 1; remove it"
                )
    low, high = algorithm.mismatch_min, algorithm.mismatch_max
    truncates_itself = preset.is_decoupled or preset.surrogate in (
        "detached_weight",
        "clamped_ratio",
    )
    if kind == "truncate" and truncates_itself:
        own = "rho" if preset.bounded_by == "rho" or preset.is_decoupled else "epsilon_high"
        yield (
            f"algorithm.mismatch_correction 'truncate' has nothing to do for loss_type "
            f"'{algorithm.loss_type}', which truncates the same ratio itself; set algorithm.{own}"
        )
    if kind == "truncate" and high < 1.0:
        yield (
            f"algorithm.mismatch_max is {high:g}, which would shrink even on-policy gradients "
            "(weight 1); set it to 1 or more (2 to 5 is usual)"
        )
    if kind == "mask" and not low <= 1.0 <= high:
        yield (
            f"algorithm.mismatch_min {low:g} to mismatch_max {high:g} leaves out on-policy tokens "
            "(ratio 1); set them to both sides of 1 (0.5 and 5 are usual)"
        )
