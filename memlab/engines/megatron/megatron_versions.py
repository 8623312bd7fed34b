"""What differs between megatron-core 0.16.1 and 0.19.2, found out from the library itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, moe_utils

PADS_PACKED_VALUES = (MAJOR, MINOR) >= (0, 18)
"""Whether latent attention pads the values of packed rows to the size of keys (``multi_latent_attention.py``)."""

HAS_FORMER_DELTA_NET = (MAJOR, MINOR) < (0, 18)
"""Whether gated delta net convolves with torch, as memlab has it; later it does with flash-linear-attention, and
compiles what is around it (``ssm/gated_delta_net.py``, 0.17.1 and 0.18.2)."""

HAS_FORMER_HYBRID_MODELS = (MAJOR, MINOR) < (0, 17)
"""Whether a stack with layers of Mamba chooses its own layers; since 0.17 the model gives it a list of them
(``ssm/mamba_block.py``, 0.16.1 and 0.17.1)."""


def grouped_experts(linear_fc1: type, linear_fc2: type) -> Any:
    """Returns what a layer provider gives for grouped experts (``megatron/core/models/backends.py``).

    0.16 needs a class and its submodules; 0.19 a callable that builds the experts.
    """
    if hasattr(experts, "GroupedMLPSubmodules"):
        submodules = experts.GroupedMLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2, activation_func=None)
        return partial(experts.TEGroupedMLP, submodules=submodules)
    return experts.TEGroupedMLP, MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)


def latent_linears_of(provider: type) -> dict[str, Any]:
    """Returns the replacements with which latent attention and latent experts take a provider's linears and norms.

    Attention asks by class which of its linears are whole on each rank; experts have no specification of theirs.
    0.19's ``QKNormConfigResolver`` gets those of norms from Transformer Engine's own provider, unless the specification
    has them.
    """
    path = "megatron.core.transformer"
    names = (f"{path}.multi_latent_attention.TELinear", f"{path}.moe.moe_layer.TELinear")
    replacements = dict.fromkeys(names, provider().linear()) | {f"{path}.moe.moe_layer.HAVE_TE": True}
    if hasattr(multi_latent_attention, "QKNormConfigResolver"):
        replacements[f"{path}.mla_qk_norm_config.get_backend"] = lambda _: provider()
    return replacements


def inner_layer(extra: torch.nn.Module) -> torch.nn.Module:
    """Returns the transformer layer in a layer of multi-token prediction."""
    return extra.get_submodule(name_of_inner_layer(extra))


def name_of_inner_layer(extra: torch.nn.Module) -> str:
    """Returns the name of the transformer layer in a layer of multi-token prediction, which 0.17 has renamed."""
    return "mtp_model_layer" if hasattr(extra, "mtp_model_layer") else "transformer_layer"


def auxiliary_losses() -> Iterator[torch.Tensor]:
    """Yields the auxiliary losses that MoE layers log, kept for the process (``transformer/moe/moe_utils.py``)."""
    for entry in _tracker().values():
        yield entry["values"] if isinstance(entry, dict) else entry.values


def zero_auxiliary_losses() -> None:
    """Zeroes the logged losses, as Megatron's training loop does after each log line."""
    for losses in auxiliary_losses():
        losses.zero_()


def forget_auxiliary_losses() -> None:
    """Drops the logged losses, so that their memory can be freed."""
    _tracker().clear()


def forget_pending_offload(layer: torch.nn.Module) -> None:
    """Drops what a layer keeps from the norm before its MLP to its own end, after a step that ended in between.

    0.19 keeps the offload of that norm as ``mlp_norm_manager``, with the layer's hidden states and their whole graph,
    and sets it to None at the layer's end (``transformer/transformer_layer.py``). In 0.16 it is a local variable.
    """
    if vars(layer).get("mlp_norm_manager") is not None:
        vars(layer)["mlp_norm_manager"] = None


def forget_norm_groups(optimizer: Any) -> None:
    """Lets an optimizer's next step ask the ranks again which parameters have a gradient norm of their own.

    0.19 asks in the first step, with a tensor on the device, and keeps the answer (``optimizer/optimizer.py``). 0.16
    has one norm.
    """
    vars(optimizer).pop("_has_grad_norm_group_cache", None)


def _tracker() -> dict[str, Any]:
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return moe_utils.get_moe_metrics_tracker().metrics
    return moe_utils.get_moe_layer_wise_logging_tracker()
