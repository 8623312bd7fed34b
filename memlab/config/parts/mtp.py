"""What a layer of multi-token prediction has beside a layer of the model.

Of ``MultiTokenPredictionLayer`` in ``megatron/core/transformer/multi_token_prediction.py``, 0.16.1. It shares embedding
and output layer with the model, and its loss is that of the tokens further on.
"""

from __future__ import annotations

from memlab.config.parts.part import Normalization, Weight, norm_weights


def joining_weights(hidden_size: int, normalization: Normalization) -> tuple[Weight, ...]:
    """Returns the norms of hidden states and embeddings, the matrix that joins them, and the norm before the logits."""
    norms = (norm_weights(f"{name}.", hidden_size, normalization) for name in ("enorm", "hnorm", "final_layernorm"))
    return *(weight for norm in norms for weight in norm), Weight("eh_proj.weight", (hidden_size, 2 * hidden_size), 0)
