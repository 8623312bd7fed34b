"""Dense architectures against transformers' own models: numbers of parameters, and logits with the same weights.

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
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "pad_token_id": 0,
    }
    windows = {"sliding_window": None} if model.family == "mistral" else {}
    return AutoConfig.for_model(model.family, **sizes, **windows)


def megatron_weights(state: dict[str, torch.Tensor], model: Architecture) -> dict[str, torch.Tensor]:
    """Returns transformers' weights by Megatron's names, in Megatron's order of rows."""
    weights = {"embedding.word_embeddings.weight": state["model.embed_tokens.weight"]}
    weights["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    weights["output_layer.weight"] = state["lm_head.weight"]
    for layer in range(model.num_layers):
        of, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias") if model.add_qkv_bias else ("weight",):
            parts = [state[f"{of}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            groups = [part.unflatten(0, (model.num_query_groups, -1)) for part in parts]
            weights[f"{to}self_attention.linear_qkv.{kind}"] = torch.cat(groups, dim=1).flatten(0, 1)
        weights[f"{to}self_attention.linear_qkv.layer_norm_weight"] = state[f"{of}input_layernorm.weight"]
        weights[f"{to}self_attention.linear_proj.weight"] = state[f"{of}self_attn.o_proj.weight"]
        for name in "qk" if model.qk_layernorm else "":
            weights[f"{to}self_attention.{name}_layernorm.weight"] = state[f"{of}self_attn.{name}_norm.weight"]
        weights[f"{to}mlp.linear_fc1.layer_norm_weight"] = state[f"{of}post_attention_layernorm.weight"]
        rows = [state[f"{of}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        weights[f"{to}mlp.linear_fc1.weight"] = torch.cat(rows)
        weights[f"{to}mlp.linear_fc2.weight"] = state[f"{of}mlp.down_proj.weight"]
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
        ours = one.live.chunk.module
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name])
        with one.backend.active():
            logits = ours.eval()(tokens, torch.arange(TOKENS).unsqueeze(0), None).float()
        expected = theirs(tokens).logits
    return (logits.view_as(expected) - expected).abs().max().item(), expected.abs().max().item()


def main() -> None:
    """Prints both tables."""
    for model in ARCHITECTURES.values():
        if model.routes or model.family == "phi3" or model.name.endswith("-tiny"):
            continue
        with torch.device("meta"):
            counted = AutoModelForCausalLM.from_config(transformers_config(model)).num_parameters()
        print(
            f"{model.name}: {counted:,}{'' if counted == model.num_parameters else f', not {model.num_parameters:,}'}"
        )
    tiny = [ARCHITECTURES[f"{name}-tiny"] for name in ("llama-3", "qwen3-dense", "qwen2.5")]
    for model in (*tiny, replace(tiny[0], name="mistral", family="mistral", kv_channels=16)):
        difference, largest = largest_difference(model)
        print(f"{model.name}: logits differ by at most {difference:.1e} of {largest:.1f}")


if __name__ == "__main__":
    main()
