"""The formulas of the cheat sheet: what one rank holds when backward begins, from a model's config alone."""

from __future__ import annotations

from dataclasses import replace

from memlab.config.architectures import Architecture

DENSE_RECOMPUTE = ("none", "mlp", "core_attn", "full")
"""What the cheat sheet has a formula for in a dense layer."""
MOE_RECOMPUTE = ("none", "full")


def bytes_by_hand(model: Architecture, num_layers: int, tokens: int, recompute: str = "none") -> dict[str, int]:
    """Returns what a rank holds when backward begins, for one sequence per micro-batch and without parallelism.

    Args:
        model: The architecture; its own number of layers does not count.
        num_layers: Transformer layers.
        tokens: Tokens in the sequence.
        recompute: One of `DENSE_RECOMPUTE`, or of `MOE_RECOMPUTE` for a model with experts.

    Returns:
        Bytes by what they are, in the order in which a step allocates them.

    Raises:
        ValueError: If there is no formula for this recompute or this model.
    """
    if model.is_moe != model.qk_layernorm:
        raise ValueError(
            f"{model.name} is {'an MoE' if model.is_moe else 'a dense'} model with"
            f"{'' if model.qk_layernorm else 'out'} norms of queries and keys, for which the cheat sheet has no "
            "formula, must be like phi-4 or Qwen3-MoE: predict a step instead (memlab predict)"
        )
    choices = MOE_RECOMPUTE if model.is_moe else DENSE_RECOMPUTE
    if recompute not in choices:
        raise ValueError(f"recompute is {recompute!r}, must be one of {', '.join(choices)}: choose one of them")
    num_parameters = replace(model, num_layers=num_layers).num_parameters
    h, t = model.hidden_size, tokens
    return {
        "parameters": 2 * num_parameters,
        "gradients": 4 * num_parameters,
        "optimizer state": 12 * num_parameters,
        "kept by the layers": num_layers * (_moe_layer if model.is_moe else _dense_layer)(model, t, recompute),
        "logits": (2 + 4) * model.vocab_size * t + 2 * (2 * h * t),
    }


def _dense_layer(model: Architecture, t: int, recompute: str) -> int:
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    a, g = model.num_attention_heads, model.num_query_groups
    per_token = {
        "none": 8 * h + 6 * f + 4 * a * d + 4 * g * d + 4 * a + 8 + 8 * d,
        "mlp": 6 * h + 4 * a * d + 4 * g * d + 4 * a + 4 + 8 * d,
        "core_attn": 8 * h + 6 * f + 6 * a * d + 6 * g * d + 8 + 8 * d,
        "full": 2 * h,
    }
    return per_token[recompute] * t


def _moe_layer(model: Architecture, t: int, recompute: str) -> int:
    h, d, m = model.hidden_size, model.kv_channels, model.moe_ffn_hidden_size
    a, g = model.num_attention_heads, model.num_query_groups
    E, k = model.num_moe_experts or 0, model.moe_router_topk  # noqa: N806  # the letters of the cheat sheet
    if recompute == "full":
        return (2 * h + 13 * E + 4) * t + 8 * E
    per_token = 8 * h + 2 * h * k + 6 * m * k + 6 * a * d + 6 * g * d + 8 * a + 4 * g + 8 * d + 24 * k + 17 * E + 12
    return per_token * t + 16 * E + 4
