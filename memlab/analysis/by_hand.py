"""The formulas of the cheat sheet: what one rank holds when backward begins, from a model's config alone."""

from __future__ import annotations

from memlab.config.architectures import Architecture


def formulas_of(model: Architecture) -> tuple[str, ...]:
    """Returns what the cheat sheet can recompute in every layer of a model, ``none`` first."""
    first, *others = (part.formulas for part in model.feed_forwards)
    refused = ("mlp",) if model.add_bias_linear else ()  # `model_restrictions.check_on_model`
    return tuple(name for name in first if all(name in each for each in others) and name not in refused)


def bytes_by_hand(model: Architecture, num_layers: int, tokens: int, recompute: str = "none") -> dict[str, int]:
    """Returns what a rank holds when backward begins, for one sequence per micro-batch and without parallelism.

    Args:
        model: The architecture; its own number of layers does not count.
        recompute: One of `formulas_of` the model.

    Returns:
        Bytes by what they are, in the order in which a step allocates them.

    Raises:
        ValueError: If there is no formula for this recompute.
    """
    choices = formulas_of(model)
    if not choices:
        raise ValueError(
            f"{model.name} has a router or shared experts, for which the cheat sheet has no formula: predict a step, "
            "or choose another model"
        )
    if recompute not in choices:
        raise ValueError(f"recompute is {recompute!r}, must be one of {', '.join(choices)}: choose one of them")
    num_parameters = model.with_layers(num_layers).num_parameters
    kinds = model.kinds_of(range(num_layers)).items()
    return {
        "parameters": 2 * num_parameters,
        "gradients": 4 * num_parameters,
        "optimizer state": 12 * num_parameters,
        "kept by the layers": sum(count * part.kept_bytes(tokens, recompute) for part, count in kinds),
        "logits, outputs of embedding and last norm": (2 + 4) * model.vocab_size * tokens
        + 2 * (2 * model.hidden_size * tokens),
    }
