"""Architectures against transformers' own models: numbers of parameters, and logits with the same weights.

    python -m benchmarks.against_transformers

Needs transformers (5.24), which memlab itself does not. Published sizes are counted on the meta device. A tiny member
of each family takes transformers' weights, in fp32 on the CPU backend; the largest difference of a logit is printed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memlab import Lab
from memlab.config.architectures import ARCHITECTURES, Architecture
from memlab.config.parts.gdn import GatedDeltaNet
from tests.unit.inside import inside

TOKENS = 64


def transformers_config(model: Architecture) -> Any:
    """Returns the config of transformers' model with an architecture's sizes."""
    sizes = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_percent,
        },
        "attention_bias": model.family in ("glm4_moe", "gpt_oss"),
        "use_qk_norm": model.qk_layernorm,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "pad_token_id": 0,
    }
    windows = {"sliding_window": None} if model.family == "mistral" else {}
    if model.window_size is not None:
        windows = {"sliding_window": model.window_size[0] + 1}
    if model.routes:
        sizes |= routing_sizes(model)
    if model.multi_latent_attention:
        sizes |= latent_sizes(model)
    if model.experimental_attention_variant is not None:
        sizes |= {name: getattr(model, name) for name in _OF_DELTA_NET}
        layers = range(model.num_layers)
        sizes["layer_types"] = [
            "linear_attention" if is_delta_net(model, each) else "full_attention" for each in layers
        ]
    family = "deepseek_v3" if model.family == "kimi_k2" else model.family
    return AutoConfig.for_model(family, **sizes, **windows)


_OF_DELTA_NET = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_OF_QWEN = dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"), "num_experts")


def is_delta_net(model: Architecture, layer: int) -> bool:
    """Whether a layer has gated delta net in the place of attention."""
    return isinstance(model.parts_of(layer)[0], GatedDeltaNet)


def routing_sizes(model: Architecture) -> dict[str, Any]:
    """Returns the fields of a config with experts and shared experts."""
    shared, width = model.moe_shared_expert_intermediate_size or 0, model.moe_ffn_hidden_size
    names = dict.fromkeys(("mixtral", "gpt_oss", "minimax_m2"), "num_local_experts") | _OF_QWEN
    experts = names.get(model.family, "n_routed_experts")
    return {
        experts: model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": width,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "shared_expert_intermediate_size": shared,
        "n_shared_experts": shared // width,
        "first_k_dense_replace": (model.moe_layer_freq or ()).count(0),
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "topk_method": "group_limited_greedy" if model.moe_router_num_groups else "greedy",
    }


def latent_sizes(model: Architecture) -> dict[str, Any]:
    """Returns the fields of a config with latent attention."""
    return {
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
    }


def megatron_weights(state: dict[str, torch.Tensor], model: Architecture) -> dict[str, torch.Tensor]:
    """Returns transformers' weights by Megatron's names, in Megatron's order of rows."""
    weights = {"embedding.word_embeddings.weight": state["model.embed_tokens.weight"]}
    weights["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    weights["output_layer.weight"] = state["lm_head.weight"]
    for layer in range(model.num_layers):
        of, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention = latent_weights if model.multi_latent_attention else attention_weights
        attention = delta_net_weights if is_delta_net(model, layer) else attention
        weights |= {f"{to}{name}": weight for name, weight in attention(state, model, of).items()}
        routes = model.num_routing([layer]) > 0
        feed_forward = expert_weights(state, model, of) if routes else dense_weights(state, of)
        weights |= {f"{to}{name}": weight for name, weight in feed_forward.items()}
    if model.experimental_attention_variant is not None:  # its norms multiply by 1 and what they learn
        norms = [name for name in weights if "norm" in name and "out_norm" not in name]
        weights |= {name: 1 + weights[name] for name in norms}
    return weights


def attention_weights(state: dict[str, torch.Tensor], model: Architecture, of: str) -> dict[str, torch.Tensor]:
    """Returns those of grouped queries, in one layer."""
    weights = {}
    if model.add_bias_linear:
        weights["self_attention.linear_proj.bias"] = state[f"{of}self_attn.o_proj.bias"]
        weights["self_attention.core_attention.softmax_offset"] = state[f"{of}self_attn.sinks"]
    for kind in ("weight", "bias") if model.add_qkv_bias or model.add_bias_linear else ("weight",):
        parts = [state[f"{of}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        if model.attention_output_gate:
            of_heads = parts[0].unflatten(0, (model.num_attention_heads, 2, -1))
            parts[:1] = [of_heads[:, which].flatten(0, 1) for which in (0, 1)]
        groups = [part.unflatten(0, (model.num_query_groups, -1)) for part in parts]
        weights[f"self_attention.linear_qkv.{kind}"] = torch.cat(groups, dim=1).flatten(0, 1)
    weights["self_attention.linear_qkv.layer_norm_weight"] = state[f"{of}input_layernorm.weight"]
    weights["self_attention.linear_proj.weight"] = state[f"{of}self_attn.o_proj.weight"]
    for name in "qk" if model.qk_layernorm else "":
        weights[f"self_attention.{name}_layernorm.weight"] = state[f"{of}self_attn.{name}_norm.weight"]
    return weights


def delta_net_weights(state: dict[str, torch.Tensor], model: Architecture, of: str) -> dict[str, torch.Tensor]:
    """Returns those of gated delta net, in one layer: transformers has the rows of each head of keys together."""
    keys, repeated = model.linear_num_key_heads, model.linear_num_value_heads // model.linear_num_key_heads
    wide, narrow = (state[f"{of}linear_attn.in_proj_{name}.weight"].unflatten(0, (keys, -1)) for name in ("qkvz", "ba"))
    values = repeated * model.linear_value_head_dim
    rows = [*wide.split([model.linear_key_head_dim] * 2 + [values] * 2, dim=1), *narrow.split(repeated, dim=1)]
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "conv1d.weight": "conv1d.weight", "out_norm.weight": "norm.weight"}
    names["out_proj.weight"] = "out_proj.weight"
    return {
        "self_attention.in_proj.weight": torch.cat([part.flatten(0, 1) for part in rows]),
        "self_attention.in_proj.layer_norm_weight": state[f"{of}input_layernorm.weight"],
        **{f"self_attention.{ours}": state[f"{of}linear_attn.{theirs}"] for ours, theirs in names.items()},
    }


def latent_weights(state: dict[str, torch.Tensor], model: Architecture, of: str) -> dict[str, torch.Tensor]:
    """Returns those of latent attention, in one layer."""
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    }
    if model.q_lora_rank is None:
        names["self_attention.linear_q_proj.weight"] = "self_attn.q_proj.weight"
    else:
        names |= {
            "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
            "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
            "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
        }
    return {ours: state[f"{of}{theirs}"] for ours, theirs in names.items()}


def dense_weights(
    state: dict[str, torch.Tensor], of: str, norm: str = "mlp.linear_fc1.layer_norm_weight"
) -> dict[str, torch.Tensor]:
    """Returns those of a dense MLP, in one layer."""
    rows = [state[f"{of}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    return {
        norm: state[f"{of}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat(rows),
        "mlp.linear_fc2.weight": state[f"{of}mlp.down_proj.weight"],
    }


def expert_weights(state: dict[str, torch.Tensor], model: Architecture, of: str) -> dict[str, torch.Tensor]:
    """Returns those of the router, the experts and the shared experts, in one layer."""
    if model.add_bias_linear:
        return clamped_expert_weights(state, model, of)
    weights = {
        "pre_mlp_layernorm.weight": state[f"{of}post_attention_layernorm.weight"],
        "mlp.router.weight": state[f"{of}mlp.gate.weight"],
    }
    for expert in range(model.num_moe_experts or 0):
        # Newer versions of transformers keep the weights of all experts in one tensor.
        weights[f"mlp.experts.linear_fc1.weight{expert}"] = state[f"{of}mlp.experts.gate_up_proj"][expert]
        weights[f"mlp.experts.linear_fc2.weight{expert}"] = state[f"{of}mlp.experts.down_proj"][expert]
    if model.moe_shared_expert_intermediate_size:
        shared = "mlp.shared_expert" if model.family in _OF_QWEN else "mlp.shared_experts"
        rows = [state[f"{of}{shared}.{name}_proj.weight"] for name in ("gate", "up")]
        weights["mlp.shared_experts.linear_fc1.weight"] = torch.cat(rows)
        weights["mlp.shared_experts.linear_fc2.weight"] = state[f"{of}{shared}.down_proj.weight"]
    if model.moe_shared_expert_gate:
        weights["mlp.shared_experts.gate_weight"] = state[f"{of}mlp.shared_expert_gate.weight"]
    return weights


def clamped_expert_weights(state: dict[str, torch.Tensor], model: Architecture, of: str) -> dict[str, torch.Tensor]:
    """Returns those of gpt-oss, in one layer: every second column of the first matrix is a gate."""
    weights = {"pre_mlp_layernorm.weight": state[f"{of}post_attention_layernorm.weight"]}
    for kind, name in (("weight", ""), ("bias", "_bias")):
        weights[f"mlp.router.{kind}"] = state[f"{of}mlp.router.{kind}"]
        for expert in range(model.num_moe_experts or 0):
            first = state[f"{of}mlp.experts.gate_up_proj{name}"][expert]
            second = state[f"{of}mlp.experts.down_proj{name}"][expert]
            weights[f"mlp.experts.linear_fc1.{kind}{expert}"] = torch.cat((first[..., ::2].t(), first[..., 1::2].t()))
            weights[f"mlp.experts.linear_fc2.{kind}{expert}"] = second.t()
    return weights


def largest_difference(model: Architecture) -> tuple[float, float]:
    """Returns the largest difference between logits of Megatron's model and of transformers', and the largest logit."""
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(transformers_config(model), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norms and biases too
    tokens = torch.randint(model.vocab_size, (1, TOKENS))
    weights = megatron_weights(theirs.state_dict(), model)
    with Lab(model, backend="cpu", dtype="fp32", seq_length=TOKENS) as lab, torch.no_grad():
        one = inside(lab).model
        ours = one.engine.live.chunk.module
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name])
        with one.backend.active():
            logits = ours.eval()(tokens, torch.arange(TOKENS).unsqueeze(0), None).float()
        expected = theirs(tokens).logits
    return (logits.view_as(expected) - expected).abs().max().item(), expected.abs().max().item()


def main() -> None:
    """Prints both tables."""
    for model in ARCHITECTURES.values():
        if model.family in ("phi3", "qwen3_moe", "gpt2") or model.name.endswith("-tiny"):
            continue
        with torch.device("meta"):
            counted = AutoModelForCausalLM.from_config(transformers_config(model)).num_parameters()
        print(
            f"{model.name}: {counted:,}{'' if counted == model.num_parameters else f', not {model.num_parameters:,}'}"
        )
    names = ("llama-3", "qwen3-dense", "qwen2.5", "mixtral", "glm-4.5", "gpt-oss", "minimax", "qwen3-next")
    tiny = [ARCHITECTURES[f"{name}-tiny"] for name in names]
    deepseek, qwen_moe = ARCHITECTURES["deepseek-tiny"], ARCHITECTURES["qwen2-moe-tiny"]
    # Without the scaling of angles, whose factors memlab leaves at Megatron's own.
    deepseek = replace(deepseek, rope_type="rope")
    softmax = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    softmax |= {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None}
    lite = replace(deepseek, name="deepseek-v2", family="deepseek_v2", q_lora_rank=None, moe_router_pre_softmax=True,
                   **softmax)  # fmt: skip
    others = (replace(tiny[0], name="mistral", family="mistral", kv_channels=16), qwen_moe, deepseek, lite)
    for model in (*tiny, *others):
        difference, largest = largest_difference(model)
        print(f"{model.name}: logits differ by at most {difference:.1e} of {largest:.1f}")


if __name__ == "__main__":
    main()
