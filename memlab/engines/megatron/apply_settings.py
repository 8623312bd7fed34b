"""Memory settings onto a live model, in place: no rebuild, and the same flags as a model that was built that way.

Megatron reads its settings twice: once when a layer is built, into attributes of the layer, and once more from the
config at each forward. Both are set here. The attributes are those of megatron-core 0.16.1 and 0.19.2, in
``transformer/transformer_layer.py``, ``transformer/transformer_block.py``, ``transformer/attention.py``,
``transformer/multi_latent_attention.py``,
``transformer/moe/moe_layer.py`` and ``transformer/moe/experts.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from memlab.config.model_restrictions import check_on_model
from memlab.config.settings import MemorySettings
from memlab.engines.megatron.activation_offload import manager as offload_manager
from memlab.engines.megatron.adapters import base_of
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.megatron_config import settings_fields, transformer_config


def apply(live: LiveModel, settings: MemorySettings) -> None:
    """Sets what the next forward recomputes and offloads.

    Args:
        live: The model; it is unchanged if the settings are refused.

    Raises:
        ValueError: If the settings break a rule on this model.
    """
    check_on_model(settings, live.scenario)
    live.drop_graphs()  # they have the former settings
    # Megatron's own checks and defaults, on a config that nothing uses.
    reference = transformer_config(live.scenario, settings)
    for name in settings_fields(settings):
        setattr(live.config, name, getattr(reference, name))
    for module in live.modules():
        attributes = vars(module)
        for name in attributes.keys() & _FLAGS.keys():
            attributes[name] = _FLAGS[name](module, settings)
        if "offload_expert_fc1" in attributes:
            # experts.py keeps one tensor instead of one view an expert, so that the offload is one copy.
            base_of(module.linear_fc1).save_original_input = attributes["offload_expert_fc1"]
        if live.config.fp8:
            _save_original_inputs(module, settings, live.config.fp8_recipe)
        if "activation_recompute" in attributes and live.config.fp8:
            # experts.py lets the next linear save what is recomputed in place of an FP8 copy.
            base_of(module.linear_fc2).save_original_input = attributes["activation_recompute"]
    offload_manager.start_over()


def _save_original_inputs(module: Any, settings: MemorySettings, recipe: str) -> None:
    """Lets linears save what another module saves or recomputes, in place of an FP8 copy (``set_save_original_input``).

    These are the first linear of shared experts, whose input the router saves, and those of latent attention after a
    recomputed norm (``transformer/moe/shared_experts.py``, ``transformer/multi_latent_attention.py``).
    """
    modules = settings.recompute_modules or ()
    if getattr(module, "shared_experts", None) is not None:
        # With the delayed recipe, which cannot, the norm is not recomputed either. A checkpoint saves its input itself.
        saves = recipe != "delayed" and "shared_experts" not in modules
        module.shared_experts.linear_fc1.save_original_input = saves
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if hasattr(module, name):
            getattr(module, name).save_original_input = "layernorm" in modules


def _recomputes(name: str) -> Callable[[Any, MemorySettings], bool]:
    return lambda module, settings: name in (settings.recompute_modules or ())


def _offloads(name: str) -> Callable[[Any, MemorySettings], bool]:
    return lambda module, settings: name in (settings.offload_modules or ())


def _where_norm(norm: str, rule: Callable[[Any, MemorySettings], bool]) -> Callable[[Any, MemorySettings], bool]:
    # A norm that is fused into the linear after it leaves an IdentityOp behind.
    return lambda module, settings: rule(module, settings) and not isinstance(getattr(module, norm), IdentityOp)


_FLAGS: dict[str, Callable[[Any, MemorySettings], bool]] = {
    "recompute_input_layernorm": _where_norm("input_layernorm", _recomputes("layernorm")),
    "recompute_pre_mlp_layernorm": _where_norm("pre_mlp_layernorm", _recomputes("layernorm")),
    "recompute_mlp": lambda module, settings: _recomputes("mlp")(module, settings) and not module.is_moe_layer,
    "checkpoint_core_attention": _recomputes("core_attn"),
    "recompute_up_proj": _recomputes("mla_up_proj"),
    "moe_layer_recompute": _recomputes("moe"),
    "shared_experts_recompute": _recomputes("shared_experts"),
    "activation_recompute": _recomputes("moe_act"),
    "offload_attn_norm": _where_norm("input_layernorm", _offloads("attn_norm")),
    "offload_qkv_linear": _offloads("qkv_linear"),
    "offload_core_attention": _offloads("core_attn"),
    "offload_core_attn": _offloads("core_attn"),
    "offload_attn_proj": _offloads("attn_proj"),
    "offload_mlp_norm": _where_norm("pre_mlp_layernorm", _offloads("mlp_norm")),
    "offload_expert_fc1": _offloads("expert_fc1"),
    "offload_moe_act": _offloads("moe_act"),
}
