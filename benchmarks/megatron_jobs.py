"""Jobs of one to eight ranks for `benchmarks.plain_megatron`, in Megatron's own names: model, layout, settings, state.

Each job steps the first layers of a published model, on one sequence of 4,096 tokens per micro-batch.
Jobs of one layout follow each other, so that they can share processes. The most important layouts come first, because a
machine's time can end before the list does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

_GROUPS = {
    "TP": "tensor_model",
    "CP": "context",
    "PP": "pipeline_model",
    "VP": "virtual_pipeline_model",
    "EP": "expert_model",
    "ETP": "expert_tensor",
}
"""Words of a layout, and what Megatron calls them before ``_parallel_size``."""
_MOE = {
    "qk_layernorm": True,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-6,
    "moe_aux_loss_coeff": 1e-3,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
}
_LATENT = {
    **_MOE,
    "multi_latent_attention": True,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_moe_experts": 64,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_layer_freq": (0,) + (1,) * 26,
}
_DELTA_NET = {
    "kv_channels": 256,
    "qk_layernorm": True,
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NO_AUX = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,  # so that each step routes as the first one did
}
_HYBRID = {
    "gated_linear_unit": False,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-5,
    "is_hybrid_model": True,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "qwen3-30b-a3b": {
        **_MOE,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
    },
    # https://huggingface.co/microsoft/phi-4/blob/main/config.json
    "phi-4": {
        "hidden_size": 5120,
        "ffn_hidden_size": 17920,
        "num_attention_heads": 40,
        "num_query_groups": 10,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-5,
    },
    # https://huggingface.co/microsoft/Phi-4-mini-instruct/blob/main/config.json; its "longrope" factors change no size.
    "phi-4-mini": {
        "hidden_size": 3072,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 24,
        "num_query_groups": 8,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-5,
    },
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-5,
    },
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json, and likewise
    "qwen3-8b": {
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 64,
        "layernorm_epsilon": 1e-5,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "ffn_hidden_size": 18944,
        "num_attention_heads": 28,
        "num_query_groups": 4,
        "kv_channels": 128,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-6,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "ffn_hidden_size": 8960,
        "num_attention_heads": 12,
        "num_query_groups": 2,
        "kv_channels": 128,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-6,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "ffn_hidden_size": 9728,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
    },
    # https://arxiv.org/abs/2005.14165, table 2.1
    "gpt3-6.7b": {
        "hidden_size": 4096,
        "ffn_hidden_size": 16384,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "layernorm_epsilon": 1e-5,
    },
    # https://huggingface.co/moonshotai/Moonlight-16B-A3B/blob/main/config.json, and likewise
    "moonlight-16b-a3b": {
        **_LATENT,
        **_NO_AUX,
        "ffn_hidden_size": 11264,
        "layernorm_epsilon": 1e-5,
        "rope_type": "rope",
        "rotary_base": 50000,
        "moe_router_num_groups": 1,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.446,
    },
    "deepseek-v2-lite": {**_LATENT, "ffn_hidden_size": 10944, "rope_type": "yarn", "moe_router_pre_softmax": True},
    "deepseek-v3": {
        **_LATENT,
        **_NO_AUX,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "rope_type": "yarn",
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_layer_freq": (0,) * 3 + (1,) * 58,
    },
    "qwen1.5-moe-a2.7b": {
        **_MOE,
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "hidden_size": 2048,
        "ffn_hidden_size": 5632,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "num_moe_experts": 60,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 1408,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 5632,
        "moe_shared_expert_gate": True,
    },
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json, and likewise
    "mixtral-8x7b": {
        **_MOE,
        "qk_layernorm": False,
        "layernorm_epsilon": 1e-5,
        "moe_aux_loss_coeff": 0.02,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 14336,
    },
    "glm-4.5-air": {
        **_MOE,
        **_NO_AUX,
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-5,
        "hidden_size": 4096,
        "ffn_hidden_size": 10944,
        "num_attention_heads": 96,
        "num_query_groups": 8,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 1408,
        "moe_router_num_groups": 1,
        "moe_router_group_topk": 1,
        "moe_layer_freq": (0,) + (1,) * 45,
    },
    # The angles are those of rope: how they are scaled changes no tensor's size.
    "gpt-oss-20b": {
        **_MOE,
        "qk_layernorm": False,
        "kv_channels": 64,
        "layernorm_epsilon": 1e-5,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "add_bias_linear": True,
        "bias_dropout_fusion": False,
        "softmax_type": "learnable",
        "window_size": (127, 0),
        "window_attn_skip_freq": 2,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "hidden_size": 2880,
        "ffn_hidden_size": 2880,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "num_moe_experts": 32,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 2880,
    },
    "minimax-m2": {
        **_MOE,
        **_NO_AUX,
        "layernorm_epsilon": 1e-6,
        "hidden_size": 3072,
        "ffn_hidden_size": 1536,
        "num_attention_heads": 48,
        "num_query_groups": 8,
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 1536,
    },
    "olmoe-1b-7b": {
        **_MOE,
        "moe_router_pre_softmax": True,
        "moe_aux_loss_coeff": 1e-2,
        "layernorm_epsilon": 1e-5,
        "hidden_size": 2048,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "num_moe_experts": 64,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 1024,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 24,
        "num_query_groups": 8,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-5,
    },
    # https://huggingface.co/mistralai/Mistral-7B-v0.3/blob/main/config.json
    "mistral-7b-v0.3": {
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-5,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "ffn_hidden_size": 4864,
        "num_attention_heads": 14,
        "num_query_groups": 2,
        "kv_channels": 64,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-6,
    },
    "qwen2.5-3b": {
        "hidden_size": 2048,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 16,
        "num_query_groups": 2,
        "kv_channels": 128,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-6,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
    },
    "qwen3-14b": {
        "hidden_size": 5120,
        "ffn_hidden_size": 17408,
        "num_attention_heads": 40,
        "num_query_groups": 8,
        "kv_channels": 128,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
    },
    # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json, and likewise
    "qwen3-next-80b-a3b": {
        **_MOE,
        **_DELTA_NET,
        "hidden_size": 2048,
        "ffn_hidden_size": 5120,
        "num_attention_heads": 16,
        "num_query_groups": 2,
        "num_moe_experts": 512,
        "moe_router_topk": 10,
        "moe_ffn_hidden_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "moe_shared_expert_gate": True,
    },
    "qwen3.5-text-4b": {
        **_DELTA_NET,
        "hidden_size": 2560,
        "ffn_hidden_size": 9216,
        "num_attention_heads": 16,
        "num_query_groups": 4,
    },
    "qwen3.5-text-9b": {
        **_DELTA_NET,
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 16,
        "num_query_groups": 4,
    },
    # src/megatron/bridge/models/nemotronh/nemotron_h_provider.py of Megatron-Bridge 0.3.1, and likewise. The positions
    # of tokens are in no embedding.
    "nemotron-h-8b": {
        **_HYBRID,
        "hidden_size": 4096,
        "ffn_hidden_size": 21504,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "mamba_num_heads": 128,
    },
    "nemotron-nano-v2-9b": {
        **_HYBRID,
        "hidden_size": 4480,
        "ffn_hidden_size": 15680,
        "num_attention_heads": 40,
        "num_query_groups": 8,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
    },
    "nemotron-3-nano-30b": {
        **_HYBRID,
        **{name: value for name, value in _MOE.items() if name not in ("qk_layernorm", "layernorm_epsilon")},
        **_NO_AUX,
        "moe_aux_loss_coeff": 1e-4,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "hidden_size": 2688,
        "ffn_hidden_size": 1856,
        "num_attention_heads": 32,
        "num_query_groups": 2,
        "mamba_num_heads": 64,
        "num_moe_experts": 128,
        "moe_router_topk": 6,
        "moe_ffn_hidden_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "moe_router_num_groups": 1,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    # https://huggingface.co/nvidia/Nemotron-Mini-4B-Instruct/blob/main/config.json
    "nemotron-mini-4b": {
        "hidden_size": 3072,
        "ffn_hidden_size": 9216,
        "num_attention_heads": 24,
        "num_query_groups": 8,
        "kv_channels": 128,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "layernorm_epsilon": 1e-5,
    },
}
"""Fields of Megatron's ``TransformerConfig``."""
HYBRIDS = {
    "nemotron-h-8b": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "nemotron-nano-v2-9b": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "nemotron-3-nano-30b": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
"""Which layers of Megatron's ``MambaModel`` are Mamba, attention, an MLP or experts."""
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"vocab_size": 151936, "rotary_base": 1000000},
    "phi-4": {"vocab_size": 100352, "rotary_base": 250000},
    "phi-4-mini": {
        "vocab_size": 200064,
        "rotary_base": 10000,
        "rotary_percent": 0.75,
        "share_embeddings_and_output_weights": True,
    },
    "llama-3.1-8b": {"vocab_size": 128256, "rotary_base": 500000},
    "qwen3-8b": {"vocab_size": 151936, "rotary_base": 1000000},
    "llama-3.2-1b": {"vocab_size": 128256, "rotary_base": 500000, "share_embeddings_and_output_weights": True},
    "qwen2.5-7b": {"vocab_size": 152064, "rotary_base": 1000000},
    "qwen2.5-1.5b": {"vocab_size": 151936, "rotary_base": 1000000, "share_embeddings_and_output_weights": True},
    "qwen3-4b": {"vocab_size": 151936, "rotary_base": 1000000, "share_embeddings_and_output_weights": True},
    "gpt3-6.7b": {
        "vocab_size": 50304,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    },
    "nemotron-mini-4b": {"vocab_size": 256000, "rotary_base": 10000, "rotary_percent": 0.5},
    # The rotary embedding of latent attention has its base from the config.
    "moonlight-16b-a3b": {"vocab_size": 163840},
    "deepseek-v2-lite": {"vocab_size": 102400},
    "deepseek-v3": {"vocab_size": 129280},
    "qwen1.5-moe-a2.7b": {"vocab_size": 151936, "rotary_base": 1000000},
    "mixtral-8x7b": {"vocab_size": 32000, "rotary_base": 1000000},
    "glm-4.5-air": {"vocab_size": 151552, "rotary_base": 1000000, "rotary_percent": 0.5},
    "gpt-oss-20b": {"vocab_size": 201088, "rotary_base": 150000},
    "minimax-m2": {"vocab_size": 200064, "rotary_base": 5000000, "rotary_percent": 0.5},
    "olmoe-1b-7b": {"vocab_size": 50304, "rotary_base": 10000},
    "llama-3.2-3b": {"vocab_size": 128256, "rotary_base": 500000, "share_embeddings_and_output_weights": True},
    "mistral-7b-v0.3": {"vocab_size": 32768, "rotary_base": 1000000},
    "qwen3-14b": {"vocab_size": 151936, "rotary_base": 1000000},
    "qwen3-next-80b-a3b": {"vocab_size": 151936, "rotary_base": 10000000, "rotary_percent": 0.25},
    "qwen3.5-text-4b": {
        "vocab_size": 248320,
        "rotary_base": 10000000,
        "rotary_percent": 0.25,
        "share_embeddings_and_output_weights": True,
    },
    "qwen3.5-text-9b": {"vocab_size": 248320, "rotary_base": 10000000, "rotary_percent": 0.25},
    **{
        name: {"vocab_size": 151936, "rotary_base": 1000000, "share_embeddings_and_output_weights": True}
        for name in ("qwen2.5-0.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b")
    },
    **{name: {"vocab_size": 131072, "position_embedding_type": "none"} for name in HYBRIDS},
}
"""Arguments of Megatron's ``GPTModel``."""
TINY = {"hidden_size": 128, "ffn_hidden_size": 256, "kv_channels": 16}
"""What a rehearsal without a GPU takes in the place of a model's own sizes; heads stay, since layouts split them."""
TINY_EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
TINY_DELTA_NET = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
TINY_LATENT = {"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
TINY_VOCABULARY, TINY_SEQUENCE, TINY_LAYERS = 512, 64, 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model in a layout, and how its steps are taken."""

    model: str
    num_layers: int
    layout: str
    """Sizes of Megatron's groups, such as ``TP2 EP4 ETP1 DP2``; groups of one rank are left out (``one rank``).
    ``SP0`` says that tensor parallel ranks have whole sequences."""
    num_microbatches: int = 1
    micro_batch_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    """Recompute and offload, as fields of Megatron's ``TransformerConfig``."""
    state: dict[str, Any] = field(default_factory=dict)
    """Options of the training state as `memlab.TrainingState` names them, which are nearly Megatron's own names."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of ``TransformerConfig``, which change the model or the schedule."""
    vocab_size: int
    seq_length: int = 4096

    @property
    def name(self) -> str:
        """All that distinguishes the job."""
        changes = {**self.settings, **self.state, **self.config}
        lists = {name: "+".join(map(str, value)) for name, value in changes.items() if isinstance(value, (tuple, list))}
        words = [f"{name}={value}" for name, value in (changes | lists).items()]
        batches = f"x{self.num_microbatches}" + f" of {self.micro_batch_size}" * (self.micro_batch_size > 1)
        return " ".join([self.model, f"{self.num_layers} layers", self.layout, batches, *words])

    @property
    def sizes(self) -> dict[str, int]:
        """The layout as fields of Megatron's ``TransformerConfig``, which takes ETP as TP if it is left out."""
        words = re.findall(r"([A-Z]+)(\d+)", self.layout)
        return {f"{_GROUPS[word]}_parallel_size": int(size) for word, size in words if word in _GROUPS}

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole job."""
        words = dict(re.findall(r"([A-Z]+)(\d+)", self.layout))
        return math.prod(int(words.get(word, 1)) for word in ("TP", "CP", "PP", "DP"))

    def tiny(self) -> Job:
        """Returns the job at sizes that a CPU steps in seconds."""
        model = MODELS[self.model]
        of_parts = {"num_moe_experts": TINY_EXPERTS, "v_head_dim": TINY_LATENT, "linear_key_head_dim": TINY_DELTA_NET}
        parts = {name: size for sign, sizes in of_parts.items() if sign in model for name, size in sizes.items()}
        return replace(
            self,
            config={**self.config, **TINY, **parts},
            num_layers=self.num_layers if self.num_layers <= 8 else TINY_LAYERS,
            vocab_size=TINY_VOCABULARY,
            seq_length=TINY_SEQUENCE,
        )


QWEN = "qwen3-30b-a3b"
PHI = "phi-4"
PHI_MINI = "phi-4-mini"
LLAMA = "llama-3.1-8b"
QWEN_8B = "qwen3-8b"
LLAMA_1B = "llama-3.2-1b"
QWEN2_7B = "qwen2.5-7b"
QWEN2_1B = "qwen2.5-1.5b"
QWEN_4B = "qwen3-4b"
GPT = "gpt3-6.7b"
MOONLIGHT = "moonlight-16b-a3b"
LITE = "deepseek-v2-lite"
V3 = "deepseek-v3"
QWEN_MOE = "qwen1.5-moe-a2.7b"
MIXTRAL = "mixtral-8x7b"
GLM = "glm-4.5-air"
GPT_OSS = "gpt-oss-20b"
MINIMAX = "minimax-m2"
OLMOE = "olmoe-1b-7b"
LLAMA_3B = "llama-3.2-3b"
MISTRAL = "mistral-7b-v0.3"
QWEN2_HALF = "qwen2.5-0.5b"
QWEN2_3B = "qwen2.5-3b"
QWEN_HALF = "qwen3-0.6b"
QWEN_2B = "qwen3-1.7b"
QWEN_14B = "qwen3-14b"
QWEN_NEXT = "qwen3-next-80b-a3b"
QWEN35_4B = "qwen3.5-text-4b"
QWEN35_9B = "qwen3.5-text-9b"
NEMOTRON_H = "nemotron-h-8b"
NANO_9B = "nemotron-nano-v2-9b"
NANO_30B = "nemotron-3-nano-30b"
NEMOTRON_MINI = "nemotron-mini-4b"
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LOW_PRECISION: dict[str, Any] = {
    "grad_reduce_in_bf16": True,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
}
"""The state of nearly all MoE recipes of NeMo-RL, and of the story of ``labs/README.md``."""
FUSED_GRADIENTS = {"gradient_accumulation_fusion": True}
UNFUSED_ACTIVATION = {"bias_activation_fusion": False}
STORY = {"num_moe_experts": 64}
"""With half of the experts, each of 4 ranks has as many experts, and gets as many rows, as each of 8 ranks in the
story of ``labs/README.md``."""


def offload(*modules: str) -> dict[str, Any]:
    """Returns the fields of activation offload."""
    return {"offload_modules": modules}


def recompute(*modules: str) -> dict[str, Any]:
    """Returns the fields of selective recompute."""
    return {"recompute_granularity": "selective", "recompute_modules": modules}


DEALLOCATE = {"deallocate_pipeline_outputs": True}
"""Megatron-Core's default is False. Megatron-LM's ``core_transformer_config_from_args`` and Megatron-Bridge set it."""
ONE_GROUP = {"num_query_groups": 1}
"""Fewer query groups than tensor parallel ranks: each rank has a part of a group's key and value."""
EXPERTS = offload("expert_fc1", "moe_act")
ATTENTION = offload("core_attn", "attn_proj")


def jobs() -> Iterator[Job]:
    """Yields every job, those of one layout together."""

    def of(model: str, num_layers: int, layout: str, *settings: dict[str, Any], **others: Any) -> Iterator[Job]:
        others |= {
            "model": model,
            "num_layers": num_layers,
            "layout": layout,
            "vocab_size": EMBEDDINGS[model]["vocab_size"],
        }
        for each in settings or ({},):
            yield Job(settings=each, **others)

    yield from of(QWEN, 4, "EP4 DP4", {}, FULL, EXPERTS, recompute("layernorm", "moe_act"))
    every = offload("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
    yield from of(QWEN, 4, "TP2 EP4 ETP1 DP2", {}, every)
    yield from of(QWEN, 4, "TP2 EP2 DP2", {}, FULL)
    yield from of(PHI_MINI, 8, "TP4", {}, FULL, {**recompute("mlp"), **ATTENTION})
    yield from of(QWEN, 4, "PP2 EP2 DP2", {}, recompute("moe"), num_microbatches=4)
    yield from of(PHI, 8, "PP4", {}, {**FULL, "recompute_method": "block"}, num_microbatches=8)
    yield from of(PHI, 8, "PP4", num_microbatches=8, config=DEALLOCATE)
    yield from of(QWEN, 8, "PP4", num_microbatches=8)
    yield from of(QWEN, 4, "CP2 EP2 DP2", {}, FULL)
    yield from of(PHI, 4, "DP4")
    yield from of(PHI, 4, "DP4", state={"overlap_grad_reduce": True})
    yield from of(QWEN, 4, "DP4")
    yield from of(QWEN, 8, "PP2 VP2 EP2 DP2", {}, EXPERTS, num_microbatches=4)
    yield from of(PHI, 8, "PP4 VP2", {}, FULL, num_microbatches=8)
    yield from of(PHI, 8, "PP4 VP2", num_microbatches=8, config=DEALLOCATE)
    bf16 = {"grad_reduce_in_bf16": True}
    yield from of(QWEN, 4, "TP2 PP2 EP2 ETP1", {}, FULL, num_microbatches=4, state=bf16)
    yield from of(PHI, 4, "CP4", {}, ATTENTION)
    yield from of(PHI, 4, "TP2 CP2", {}, recompute("layernorm", "mlp"))
    for num_layers in (40, 48):
        yield from of(QWEN, num_layers, "EP4 DP4", EXPERTS, config=STORY, state=LOW_PRECISION)
    yield from of(QWEN, 4, "CP4 EP4", {}, recompute("moe_act"))
    yield from of(PHI, 8, "TP2 PP2", {}, recompute("core_attn"), num_microbatches=4)
    yield from of(QWEN, 4, "TP4 EP4 ETP1", {}, FULL)
    yield from chain(further_layouts_of_four_ranks(of), eight_ranks(of), one_rank(of), latent_attention(of))
    yield from chain(
        shared_experts_and_routers(of), families_of_experts(of), further_experts(of), dispatch_of_tokens(of)
    )
    yield from adapters(of)
    yield from dense_families(of)
    yield from chain(defaults_of_frameworks(of), classic_gpt(of), heads_and_reference_models(of), own_layers(of),
                     teachers(of), fp8_parameters(of, *["one rank"] * 3))  # fmt: skip
    yield from chain(small_switches(of), mamba(of), gated_delta_net(of), latent_experts(of))
    # Two ranks.
    yield from chain(latent_attention_of_two_ranks(of), fp8_parameters(of, "TP2", "DP2", "EP2 DP2"))
    yield from of(PHI, 4, "PP2", {}, FULL, num_microbatches=4, config=DEALLOCATE)
    yield from of(PHI, 4, "PP2", num_microbatches=4)
    yield from of(QWEN, 4, "PP2", {}, recompute("moe"), num_microbatches=4, config=DEALLOCATE)
    yield from of(QWEN_4B, 4, "PP2", num_microbatches=4, config=DEALLOCATE)
    yield from of(PHI, 4, "PP2 VP2", num_microbatches=4)
    yield from of(PHI, 4, "PP2 VP2", {}, FULL, num_microbatches=4, config=DEALLOCATE)
    yield from of(LLAMA, 4, "TP2", {}, FULL, recompute("layernorm", "mlp"), ATTENTION)
    yield from of(QWEN_8B, 4, "TP2", {}, FULL, recompute("layernorm", "core_attn"), ATTENTION)
    yield from of(PHI, 4, "TP2", {}, FULL, ATTENTION, config=ONE_GROUP)
    yield from of(QWEN, 4, "TP2 EP2 ETP1", {}, recompute("moe_act"), config=ONE_GROUP)
    yield from of(LLAMA, 4, "DP2", {}, state=LOW_PRECISION)
    yield from of(QWEN_4B, 8, "DP2", {}, {**recompute("layernorm"), **ATTENTION})
    yield from of(QWEN_8B, 4, "CP2", {}, FULL)
    for some in (exchanges_of_heads, rings_of_flash_attn, fusions_of_two_ranks, classic_gpt_of_two_ranks,
                 heads_of_two_ranks, adapters_of_two_ranks, teachers_of_two_ranks):  # fmt: skip
        yield from some(of)


def latent_experts(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank whose tokens have fewer columns while they are with experts."""
    alone, narrow = "one rank", {"moe_latent_size": 1024, "num_moe_experts": 32}
    yield from of(QWEN, 2, alone, {}, FULL, recompute("moe_act"), EXPERTS, config=narrow)
    yield from of(QWEN, 2, alone, num_microbatches=3, config=narrow)
    yield from of(QWEN, 2, alone, config=narrow, state=TENSORWISE)
    yield from of(MOONLIGHT, 3, alone, {}, FULL, config={"moe_latent_size": 512, "num_moe_experts": 16})


def further_layouts_of_four_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of layouts that combine two or three kinds of parallelism, and three with a loss per token."""
    yield from of(PHI, 4, "TP2 DP2", {}, FULL)
    yield from of(PHI, 4, "PP2 DP2", {}, num_microbatches=4)
    yield from of(PHI, 4, "CP2 DP2", {})
    yield from of(PHI, 4, "CP2 PP2", {}, FULL, num_microbatches=4)
    yield from of(LLAMA, 8, "TP2 PP2 VP2", {}, num_microbatches=4)
    yield from of(QWEN, 4, "CP2 PP2 EP2", {}, recompute("moe_act"), num_microbatches=4)
    yield from of(QWEN, 4, "TP2 CP2 EP2 ETP1", {}, FULL)
    yield from of(QWEN, 4, "EP2 DP4", {})
    for layout, num_microbatches in (("PP4", 8), ("CP2 DP2", 1)):
        yield from of(PHI, 4, layout, num_microbatches=num_microbatches, config=PER_TOKEN)
    yield from of(QWEN, 4, "EP2 DP4", config=PER_TOKEN)


def eight_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields the layouts of eight GPUs, among them the whole job of the story in ``labs/README.md``."""
    yield from of(QWEN, 48, "EP8 DP8", EXPERTS, state=LOW_PRECISION)
    yield from of(PHI, 4, "TP2 PP2 DP2", {}, FULL, num_microbatches=4)
    yield from of(QWEN, 4, "EP8 DP8", {}, FULL)
    yield from of(QWEN, 4, "TP2 EP8 ETP1 DP4", {}, FULL)
    yield from of(PHI, 4, "CP8", {}, FULL)
    yield from of(PHI, 8, "PP8", {}, FULL, num_microbatches=16)


def mamba(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with layers of Mamba."""
    alone = "one rank"
    yield from of(NEMOTRON_H, 9, alone, {}, recompute("core_attn"), ATTENTION, FULL)
    yield from of(NANO_30B, 6, alone, {}, recompute("moe_act"), EXPERTS, recompute("moe"))
    yield from of(NEMOTRON_H, 9, alone, num_microbatches=3, state=LOW_PRECISION | FUSED_GRADIENTS)
    yield from of(NANO_30B, 13, alone, num_microbatches=2, config={"num_moe_experts": 32}, state=LOW_PRECISION)
    yield from of(NANO_30B, 6, alone, recompute("layernorm", "moe_act"), recompute("shared_experts"))
    # With few logits, the peak is in the backward pass of a layer of Mamba.
    small = chain(
        of(NEMOTRON_H, 5, alone, seq_length=8192),
        of(NEMOTRON_H, 3, alone, micro_batch_size=2),
        of(NEMOTRON_H, 1, alone, seq_length=16384),
        of(NANO_30B, 7, alone, config={"num_moe_experts": 32}),
        of(NANO_9B, 8, alone),
    )
    yield from (replace(job, vocab_size=4096) for job in small)


CRITIC = {"num_labels": 1}
REFERENCE = {"reference_model": "copy"}


def heads_and_reference_models(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with a head in place of the output layer, and with a frozen model that runs first."""
    alone = "one rank"
    for model, own in ((LLAMA, recompute("mlp")), (QWEN_4B, ATTENTION), (QWEN, recompute("moe_act"))):
        yield from of(model, 4, alone, {}, FULL, own, state=CRITIC)
        yield from of(model, 4, alone, {}, FULL, state=REFERENCE)
    yield from of(LLAMA, 4, alone, num_microbatches=3, state=CRITIC | LOW_PRECISION | FUSED_GRADIENTS)
    yield from of(LLAMA, 4, alone, num_microbatches=3, state=REFERENCE | LOW_PRECISION | FUSED_GRADIENTS)
    without = {"reference_model": "without_adapters"}
    yield from of(LLAMA, 4, alone, {}, FULL, state=lora_of_ms_swift(8) | without)
    yield from of(QWEN, 2, alone, {}, FULL, state=lora_of_ms_swift(8) | without)


def heads_of_two_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of two ranks with a head or a reference model, each kind of parallelism once."""
    yield from of(LLAMA, 4, "TP2", {}, FULL, state=CRITIC)
    yield from of(QWEN_4B, 4, "PP2", num_microbatches=4, config=DEALLOCATE, state=CRITIC)
    yield from of(LLAMA, 4, "TP2", state=REFERENCE)
    yield from of(QWEN_4B, 4, "DP2", state=REFERENCE)


LAYERS = {"llama-3.2-1b": 16, "qwen3-4b": 36}
"""Of teachers, which have all of theirs."""
KL = {"loss": "logits_kl", "reference_model": "copy"}
GKD = {"loss": "jsd", "fp32_output": True, "reference_model": "copy"}


def teachers(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one and of two ranks that distil: a teacher of the student's kind, or another one as a whole."""
    alone = "one rank"
    yield from of(LLAMA, 4, alone, {}, FULL, state=KL)
    yield from of(QWEN, 4, alone, state=KL)
    yield from of(LLAMA_1B, 4, alone, {}, FULL, num_microbatches=3, state=KL | {"teacher_model": "llama-3.2-1b"})
    yield from of(QWEN_4B, 4, alone, {}, FULL, state=GKD)
    yield from of(LLAMA_1B, 4, alone, num_microbatches=3, state=GKD | {"teacher_model": "llama-3.2-1b"})
    yield from of(QWEN, 2, alone, num_microbatches=2, state=GKD | {"teacher_model": "qwen3-4b"})
    largest = GKD | {"gkd_logits_topk": 64}
    yield from of(QWEN_4B, 4, alone, {}, FULL, state=largest)
    yield from of(LLAMA_1B, 4, alone, num_microbatches=3, state=largest | {"teacher_model": "llama-3.2-1b"})
    yield from of(QWEN_4B, 4, alone, num_microbatches=3, state=largest | {"reference_model": "none"})
    yield from of(LLAMA, 4, alone, {}, FULL, state=KL | TENSORWISE)
    yield from of(LLAMA, 4, alone, state=REFERENCE | TENSORWISE)
    yield from of(QWEN_4B, 4, alone, num_microbatches=2, state=GKD | BLOCKWISE)
    yield from of(LLAMA_1B, 4, alone, num_microbatches=2, state=KL | DELAYED | {"teacher_model": "llama-3.2-1b"})
    yield from of(QWEN, 2, alone, state=KL | TENSORWISE)
    yield from of(LLAMA, 4, alone, state=REFERENCE | TENSORWISE | FP8_PARAMETERS)
    yield from of(LLAMA, 4, alone, state=KL | TENSORWISE | FP8_PARAMETERS)
    yield from of(LLAMA, 4, alone, FULL, state=REFERENCE | BLOCKWISE | FP8_PARAMETERS)


def teachers_of_two_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs that distil on two ranks."""
    yield from of(LLAMA, 4, "TP2", {}, FULL, state=KL)
    yield from of(QWEN_4B, 4, "DP2", state=GKD)


FEW_EXPERTS = {"num_moe_experts": 16}
EXTRA = {"mtp_num_layers": 1}
V3_OF_TWO_LAYERS = {"num_moe_experts": 32, "moe_layer_freq": (0, 1)}


def families_of_experts(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with further families of experts, multi-token prediction, sinks and windows."""
    alone, some_experts = "one rank", {"num_moe_experts": 32}
    yield from of(GLM, 3, alone, {}, FULL, *map(recompute, ("shared_experts", "moe_act", "layernorm")), EXPERTS,
                  ATTENTION, config=some_experts)  # fmt: skip
    yield from of(GLM, 3, alone, {}, FULL, config=some_experts | EXTRA)
    yield from of(MIXTRAL, 2, alone, {}, FULL, *map(recompute, ("moe_act", "moe", "core_attn")), EXPERTS, ATTENTION)
    yield from of(MIXTRAL, 2, alone, recompute("layernorm"), recompute("layernorm", "moe_act"))
    yield from of(MIXTRAL, 2, alone, num_microbatches=3)
    yield from of(MIXTRAL, 2, alone, {}, FULL, state=LOW_PRECISION)
    yield from of(MOONLIGHT, 3, alone, config=FEW_EXPERTS | {"mtp_num_layers": 2})
    yield from of(MOONLIGHT, 3, alone, num_microbatches=3, config=FEW_EXPERTS | EXTRA)
    yield from of(QWEN, 2, alone, ATTENTION, recompute("core_attn"), recompute("moe"), config=EXTRA)
    yield from of(PHI, 2, alone, {}, FULL, recompute("mlp"), config=EXTRA)
    for parts in ({"softmax_type": "learnable"}, {"window_size": (127, 0), "window_attn_skip_freq": 2}):
        yield from of(LLAMA_1B, 4, alone, {}, FULL, config=parts)
    yield from of(GPT_OSS, 2, alone, {}, FULL, *map(recompute, ("moe_act", "core_attn")), EXPERTS)
    yield from of(GPT_OSS, 2, alone, state=UNFUSED_ACTIVATION)


BLOCKWISE = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
TENSORWISE = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
FP8_PARAMETERS = {"fp8_param_gather": True}
OVERLAP = {"moe_shared_expert_overlap": True}


def fp8_parameters(of: Callable[..., Iterator[Job]], layout: str, copies: str, experts: str) -> Iterator[Job]:
    """Yields jobs whose weights are in FP8, by each recipe of Hopper."""
    for recipe in (DELAYED, TENSORWISE, BLOCKWISE):
        yield from of(LLAMA, 4, layout, {}, FULL, state=recipe | FP8_PARAMETERS)
    yield from of(LLAMA, 4, copies, state=TENSORWISE | FP8_PARAMETERS | {"use_precision_aware_optimizer": True})
    yield from of(QWEN, 2, experts, {}, FULL, state=TENSORWISE | FP8_PARAMETERS)
    yield from of(OLMOE, 4, experts, {}, FULL, recompute("core_attn"))


def further_experts(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with gpt-oss and MiniMax-M2, parts of experts in FP8, and overlapped shared experts."""
    alone, some_experts = "one rank", {"num_moe_experts": 32}
    groups = offload("qkv_linear", "core_attn", "attn_proj", "mlp_norm")
    yield from of(GPT_OSS, 2, alone, recompute("moe"), recompute("layernorm", "moe_act"), ATTENTION, groups,
                  {**recompute("moe_act"), **EXPERTS})  # fmt: skip
    yield from of(GPT_OSS, 2, alone, num_microbatches=3)
    yield from of(GPT_OSS, 2, alone, state=LOW_PRECISION)
    yield from of(GPT_OSS, 2, alone, {}, recompute("moe_act"), state=FUSED_GRADIENTS)
    yield from of(LLAMA_1B, 4, alone, recompute("core_attn"), ATTENTION, config={"softmax_type": "learnable"})
    yield from of(MINIMAX, 2, alone, {}, FULL, *map(recompute, ("core_attn", "moe_act", "layernorm", "moe")), ATTENTION,
                  groups, EXPERTS, config=some_experts)  # fmt: skip
    yield from of(MOONLIGHT, 3, alone, {}, FULL, *map(recompute, ("mla_up_proj", "shared_experts", "moe_act")),
                  config=FEW_EXPERTS, state=BLOCKWISE)  # fmt: skip
    yield from of(MOONLIGHT, 3, alone, {}, recompute("mla_up_proj"), config=FEW_EXPERTS, state=TENSORWISE)
    yield from of(V3, 2, alone, {}, FULL, config=V3_OF_TWO_LAYERS, state=LOW_PRECISION | BLOCKWISE)
    yield from of(QWEN_MOE, 2, alone, {}, recompute("shared_experts"), state=BLOCKWISE)
    yield from of(QWEN, 2, alone, {}, FULL, config=EXTRA, state=BLOCKWISE)
    yield from of(QWEN_MOE, 2, alone, {}, FULL, recompute("moe_act"), ATTENTION, config=OVERLAP)
    yield from of(MOONLIGHT, 3, alone, {}, recompute("mla_up_proj"), config=FEW_EXPERTS | OVERLAP)


def latent_attention(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with latent attention, after a dense layer: every module to recompute and to offload."""
    alone = "one rank"
    norm = offload("attn_norm", "mlp_norm")
    all_groups = offload("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
    modules = ("mla_up_proj", "layernorm", "shared_experts", "moe_act", "core_attn", "mlp", "moe")
    for model in (MOONLIGHT, LITE):
        yield from of(model, 3, alone, {}, FULL, *map(recompute, modules), config=FEW_EXPERTS)
        many = recompute("layernorm", "mla_up_proj", "moe_act", "shared_experts")
        yield from of(model, 3, alone, many, norm, offload("qkv_linear"), ATTENTION, EXPERTS, all_groups,
                      {**recompute("mla_up_proj"), **EXPERTS}, config=FEW_EXPERTS)  # fmt: skip
        yield from of(model, 3, alone, {}, recompute("mla_up_proj"), config=FEW_EXPERTS, state=LOW_PRECISION)
        yield from of(model, 3, alone, num_microbatches=3, config=FEW_EXPERTS)
    fused = {"apply_rope_fusion": True}
    yield from of(LITE, 3, alone, {}, recompute("mla_up_proj"), ATTENTION, config=FEW_EXPERTS, state=fused)
    for state in (FUSED_GRADIENTS, UNFUSED_ACTIVATION):
        yield from of(MOONLIGHT, 3, alone, {}, recompute("mla_up_proj"), config=FEW_EXPERTS, state=state)
    yield from of(V3, 2, alone, {}, recompute("mla_up_proj"), recompute("layernorm", "mla_up_proj"), FULL, ATTENTION,
                  config=V3_OF_TWO_LAYERS, state=LOW_PRECISION)  # fmt: skip


def latent_attention_of_two_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of two ranks with latent attention or shared experts."""
    yield from of(MOONLIGHT, 3, "TP2 EP2 ETP1", {}, recompute("mla_up_proj", "shared_experts"))
    yield from of(MOONLIGHT, 3, "EP2 DP2", {}, FULL)
    yield from of(LITE, 3, "TP2", {}, recompute("mla_up_proj"), ATTENTION, config=FEW_EXPERTS)
    yield from of(QWEN_MOE, 2, "TP2 EP2 ETP1", {}, recompute("shared_experts"))
    yield from of(LITE, 4, "PP2", {}, recompute("mla_up_proj"), num_microbatches=4, config=FEW_EXPERTS | DEALLOCATE)


def shared_experts_and_routers(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with shared experts behind a gate, and with each kind of router and of its losses."""
    alone = "one rank"
    modules = ("shared_experts", "moe_act", "layernorm", "moe", "core_attn")
    yield from of(QWEN_MOE, 2, alone, {}, FULL, *map(recompute, modules), EXPERTS, ATTENTION)
    yield from of(QWEN_MOE, 2, alone, {}, recompute("shared_experts"), state=UNFUSED_ACTIVATION)
    yield from of(QWEN_MOE, 2, alone, state=LOW_PRECISION)
    yield from of(QWEN_MOE, 2, alone, num_microbatches=3)
    sigmoid = {"moe_router_score_function": "sigmoid"}
    groups = {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
    for config in (sigmoid, _NO_AUX, _NO_AUX | groups, groups, {"moe_router_topk_scaling_factor": 2.5},
                   {"moe_router_pre_softmax": True}, {"moe_aux_loss_coeff": 0.0}):  # fmt: skip
        yield from of(QWEN, 2, alone, {}, recompute("moe_act"), config=config)
    losses: list[dict[str, Any]] = [{"moe_z_loss_coeff": 1e-3}, {"freeze_moe_router": True}]
    losses += [{"moe_permute_fusion": False}]
    losses += [{"moe_router_load_balancing_type": kind} for kind in ("none", "seq_aux_loss", "global_aux_loss")]
    for state in losses:
        yield from of(QWEN, 2, alone, {}, recompute("moe_act"), state=state)
    for model, num_layers, config in ((QWEN, 2, {}), (MOONLIGHT, 3, FEW_EXPERTS)):
        yield from of(model, num_layers, alone, {}, FULL, recompute("moe_act"), config=config | {"mtp_num_layers": 1})


def dispatch_of_tokens(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank whose dispatcher gathers tokens, or whose experts have a capacity."""
    alone, gather = "one rank", {"moe_token_dispatcher_type": "allgather"}
    yield from of(QWEN, 2, alone, {}, FULL, recompute("moe_act"), EXPERTS, state=gather)
    yield from of(QWEN, 2, alone, {}, FULL, state=gather | {"moe_permute_fusion": False})
    yield from of(QWEN, 2, alone, num_microbatches=3, state=gather)
    yield from of(MOONLIGHT, 3, alone, {}, recompute("moe"), config=FEW_EXPERTS, state=gather)
    yield from of(QWEN, 2, alone, {}, FULL, recompute("moe_act"), state={"moe_router_fusion": True})
    yield from of(QWEN, 2, alone, state={"moe_router_fusion": True, "moe_router_force_load_balancing": True})
    yield from of(MOONLIGHT, 3, alone, config=FEW_EXPERTS, state={"moe_router_fusion": True})
    for factor in (1.0, 2.0):
        capacity = {"moe_expert_capacity_factor": factor}
        yield from of(QWEN, 2, alone, {}, FULL, state=capacity)
        yield from of(QWEN, 2, alone, {}, recompute("moe_act"), EXPERTS,
                      state=capacity | {"moe_pad_expert_input_to_capacity": True})  # fmt: skip
    yield from of(QWEN, 2, alone, state=capacity | {"moe_token_drop_policy": "position", "moe_permute_fusion": False})


def one_rank(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank: what a version of Transformer Engine may change is not in the layout."""
    alone = "one rank"
    yield from of(QWEN, 2, alone, {}, FULL, recompute("layernorm", "moe_act"), EXPERTS)
    yield from of(PHI, 2, alone, {}, FULL, recompute("mlp"), ATTENTION)
    yield from of(QWEN, 2, alone, num_microbatches=3)
    yield from of(PHI, 2, alone, FULL, num_microbatches=3)
    moments = [{"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype} for dtype in ("bf16", "fp16", "fp8")]
    blockwise = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    for state in (
        {"grad_reduce_in_bf16": True},
        {"use_precision_aware_optimizer": True},
        LOW_PRECISION,
        *(LOW_PRECISION | each for each in moments),
        LOW_PRECISION | {"exp_avg_dtype": "bf16"},
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        {"apply_rope_fusion": True},
        blockwise,
        {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    ):
        yield from of(QWEN, 2, alone, state=state)
    for state in (LOW_PRECISION | moments[0], blockwise):
        yield from of(PHI, 2, alone, {}, FULL, state=state)


def exchanges_of_heads(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of two ranks that share sequences and exchange heads; gpt-oss has no other way."""
    heads = {"cp_comm_type": "a2a"}
    yield from of(QWEN_8B, 4, "CP2", {}, FULL, recompute("core_attn"), ATTENTION, state=heads)
    yield from of(GPT_OSS, 2, "CP2", {}, FULL, state=heads)


def rings_of_flash_attn(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs with flash-attn: of two ranks that pass keys and values around, and of one."""
    flash = {"attention_backend": "flash"}
    yield from of(QWEN_8B, 4, "CP2", {}, FULL, recompute("core_attn"), ATTENTION, state=flash)
    yield from of(PHI, 4, "CP2", {}, state=flash)
    yield from of(QWEN, 2, "CP2 EP2", {}, recompute("moe_act"), state=flash)
    yield from of(QWEN_8B, 2, "one rank", {}, FULL, state=flash)
    for model in (QWEN_8B, PHI):
        yield from of(model, 4, "CP2", {}, FULL, recompute("core_attn"), state=flash | {"cp_comm_type": "a2a"})


def fusions_of_two_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of two ranks with the fusions of frameworks, each kind of parallelism once."""
    both = FUSED_GRADIENTS | UNFUSED_ACTIVATION
    yield from of(LLAMA, 4, "TP2", {}, FULL, state=both)
    yield from of(QWEN2_7B, 4, "TP2", {}, FULL)
    yield from of(QWEN2_7B, 4, "TP2", state=both)
    yield from of(QWEN, 4, "TP2 EP2 ETP1", {}, recompute("moe_act"), state=both)
    yield from of(PHI, 4, "PP2", num_microbatches=4, config=DEALLOCATE, state=both)
    yield from of(QWEN_4B, 4, "PP2", num_microbatches=4, config=DEALLOCATE, state=FUSED_GRADIENTS)
    yield from of(QWEN_8B, 4, "DP2", state=both | {"overlap_grad_reduce": True})
    yield from of(QWEN2_1B, 4, "DP2", {}, state=FUSED_GRADIENTS)
    yield from of(QWEN_8B, 4, "CP2", {}, FULL, state=both)


def dense_families(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank of dense families, with untied and with tied embeddings."""
    alone = "one rank"
    for model in (LLAMA, QWEN_8B, QWEN2_7B):
        yield from of(model, 4, alone, {}, FULL, recompute("mlp"), recompute("layernorm", "core_attn"), ATTENTION)
        yield from of(model, 4, alone, state=LOW_PRECISION)
        yield from of(model, 4, alone, num_microbatches=3)
    for model in (LLAMA_1B, QWEN_4B, QWEN2_1B):
        yield from of(model, 4, alone, {}, FULL, recompute("mlp"), ATTENTION)
        yield from of(model, 4, alone, num_microbatches=3, state=FUSED_GRADIENTS)
    both = FUSED_GRADIENTS | UNFUSED_ACTIVATION
    for model in (LLAMA, QWEN_8B, QWEN2_7B):
        yield from of(model, 3, alone, recompute("mlp"), recompute("layernorm", "core_attn"), ATTENTION, state=both)
    for model in (LLAMA_1B, QWEN_4B, QWEN2_1B):
        yield from of(model, 3, alone, {}, FULL, state=UNFUSED_ACTIVATION)


def small_switches(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank of models and with switches that no other job has."""
    alone, beside = "one rank", {"lm_loss_beside": True}
    yield from of(LLAMA_3B, 4, alone, state=DROPS)
    yield from of(MISTRAL, 4, alone, recompute("layernorm", "mlp"), seq_length=8192,
                  state=LOW_PRECISION | UNFUSED_ACTIVATION)  # fmt: skip
    yield from of(MISTRAL, 4, alone, ATTENTION, micro_batch_size=3, seq_length=2048, state=FUSED_GRADIENTS)
    yield from of(QWEN2_3B, 4, alone, num_microbatches=2, state=WHOLE_OPTIMIZER, config=PER_TOKEN)
    yield from of(QWEN2_HALF, 8, alone, FULL | {"recompute_method": "block", "recompute_num_layers": 5}, state=CRITIC)
    yield from of(QWEN_2B, 4, alone, recompute("core_attn"), micro_batch_size=2, state={"apply_rope_fusion": True})
    yield from of(QWEN_HALF, 8, alone, num_microbatches=2, state=REFERENCE | FUSED_GRADIENTS)
    yield from of(QWEN_14B, 2, alone, state=FUSED_GRADIENTS | UNFUSED_ACTIVATION)
    yield from of(MIXTRAL, 2, alone, state={"moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp64"})
    padded = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
    yield from of(MIXTRAL, 2, alone, recompute("moe_act"), state=padded | UNFUSED_ACTIVATION)
    yield from of(OLMOE, 2, alone, num_microbatches=2, state=FUSED_GRADIENTS | {"moe_z_loss_coeff": 1e-3})
    by_position = {"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"}
    yield from of(OLMOE, 2, alone, FULL, micro_batch_size=2, state=by_position | {"hidden_dropout": 0.1})
    yield from of(QWEN, 2, alone, recompute("layernorm", "moe_act"),
                  state=LOW_PRECISION | FUSED_GRADIENTS | {"moe_router_dtype": "fp64"})  # fmt: skip
    # The cross entropy beside a teacher's loss, and rows of several sequences.
    yield from of(LLAMA_1B, 4, alone, num_microbatches=3, state=GKD | beside | {"teacher_model": "llama-3.2-1b"})
    yield from of(QWEN_4B, 4, alone, state=GKD | beside)
    yield from of(QWEN_4B, 4, alone, FULL, num_microbatches=2, state=GKD | beside | {"gkd_logits_topk": 64})
    yield from of(LLAMA_1B, 4, alone, micro_batch_size=2, state=GKD | beside)
    yield from of(LLAMA, 4, alone, state=KL | beside | {"logit_kl_topk": 512})
    yield from of(LLAMA_1B, 4, alone, micro_batch_size=2, state=KL)
    yield from of(LLAMA_1B, 4, alone, micro_batch_size=2, num_microbatches=2, state=KL | beside)
    yield from of(LLAMA_3B, 4, alone, FULL, num_microbatches=3, state=FUSED_GRADIENTS | FUSED_LOSS)


FUSED_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
PER_TOKEN = {"calculate_per_token_loss": True}


def defaults_of_frameworks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank with the fusions of Megatron-LM, Megatron-Bridge and Megatron-Core."""
    alone, blockwise = "one rank", {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    for model, own in ((QWEN, (recompute("moe_act"), EXPERTS)), (PHI, (recompute("mlp"), ATTENTION))):
        for state in (FUSED_GRADIENTS, UNFUSED_ACTIVATION):
            yield from of(model, 2, alone, {}, FULL, *own, state=state)
        yield from of(model, 2, alone, {}, state=LOW_PRECISION | FUSED_GRADIENTS | UNFUSED_ACTIVATION)
        yield from of(model, 2, alone, num_microbatches=3, state=FUSED_GRADIENTS | UNFUSED_ACTIVATION)
        yield from of(model, 2, alone, state=blockwise | FUSED_GRADIENTS)
        yield from of(model, 2, alone, state=blockwise | UNFUSED_ACTIVATION)
    yield from of(QWEN, 2, alone, recompute("moe"), recompute("moe_act") | EXPERTS, state=UNFUSED_ACTIVATION)
    for model in (LLAMA, QWEN_8B, QWEN2_7B):
        yield from of(model, 4, alone, {}, FULL, state=FUSED_GRADIENTS | UNFUSED_ACTIVATION)


def lora(rank: int, *targets: str, **others: Any) -> dict[str, Any]:
    """Returns the fields of adapters; Megatron-Bridge's targets are all linears."""
    named = {"target_modules": targets} if targets else {}
    return {f"lora_{name}": value for name, value in {"rank": rank, **named, **others}.items()}


OF_ATTENTION = ("linear_qkv", "linear_proj")
OF_MLP = ("linear_fc1", "linear_fc2")


OF_LATENT_ATTENTION = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
OF_PARTS = ("linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2")
"""In the canonical form."""


OF_ALL_LINEARS: dict[str, Any] = {"lora_target_modules": ()}
"""Of the output layer too, and not of experts: NeMo-RL's default."""


def lora_of_ms_swift(rank: int, *targets: str, dropout: float = 0.05) -> dict[str, Any]:
    """Returns the fields of ms-swift's adapters, with its permutation of tokens."""
    state = lora(rank, *targets, dropout=dropout, library="mcore_bridge", enable_input_require_grads=True)
    return state | FUSED_GRADIENTS | {"moe_permute_fusion": False}


def adapters_of_ms_swift(of: Callable[..., Iterator[Job]], layouts: tuple[str, ...]) -> Iterator[Job]:
    """Yields jobs that train ms-swift's adapters: of a dense model, and one for each expert."""
    for layout in layouts:
        if "EP" not in layout:
            yield from of(LLAMA, 2, layout, {}, FULL, state=lora_of_ms_swift(8))
        if "TP" not in layout:
            yield from of(QWEN, 2, layout, {}, FULL, state=lora_of_ms_swift(8))
    yield from of(QWEN, 2, layouts[0], state=lora_of_ms_swift(32, *OF_ATTENTION, dropout=0.0))


def adapters_of_ms_swift_in_fp8(of: Callable[..., Iterator[Job]], alone: str) -> Iterator[Job]:
    """Yields jobs whose adapters compute in FP8, or in bf16 beside FP8 parameters, and with multi-token prediction."""
    in_fp8, beside = lora_of_ms_swift(16), lora_of_ms_swift(8) | FP8_PARAMETERS
    yield from of(LLAMA, 2, alone, {}, FULL, state=in_fp8 | BLOCKWISE)
    yield from of(LLAMA, 2, alone, {}, FULL, state=in_fp8 | TENSORWISE)
    yield from of(LLAMA, 2, alone, {}, FULL, state=beside | BLOCKWISE)
    yield from of(LLAMA, 2, alone, {}, state=lora(8) | TENSORWISE | FP8_PARAMETERS)
    yield from of(QWEN, 2, alone, {}, FULL, state=in_fp8 | TENSORWISE)
    yield from of(QWEN, 2, alone, {}, state=in_fp8 | BLOCKWISE)
    yield from of(QWEN, 2, alone, {}, state=beside | BLOCKWISE)
    every = lora_of_ms_swift(8, *OF_ATTENTION, *OF_MLP, "eh_proj")
    yield from of(QWEN, 2, alone, {}, FULL, config=EXTRA, state=every)


def adapters(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank that train adapters."""
    alone = "one rank"
    mlp, activation = recompute("mlp"), recompute("layernorm", "moe_act")
    for model, own in ((LLAMA, mlp), (PHI, mlp), (QWEN_8B, mlp), (QWEN, activation)):
        others = EXPERTS if model == QWEN else ATTENTION
        yield from of(model, 4, alone, {}, FULL, own, others, state=lora(16))
        yield from of(model, 4, alone, {}, FULL, state=lora(8, *OF_ATTENTION))
        yield from of(model, 2, alone, {}, FULL, state=lora(64))
        yield from of(model, 2, alone, {}, FULL, state=lora(32, *OF_MLP))
        yield from of(model, 2, alone, {}, state=lora(32, dropout=0.1))
    for model in (LLAMA, QWEN):
        yield from of(model, 4, alone, FULL | {"recompute_num_layers": 2}, state=lora(16))
        yield from of(model, 4, alone, {**FULL, "recompute_method": "block", "recompute_num_layers": 2}, state=lora(16))
        yield from of(model, 4, alone, recompute("core_attn"), offload("core_attn", "attn_proj"), state=lora(32))
        yield from of(model, 4, alone, {}, num_microbatches=3, state=lora(16))
        yield from of(model, 4, alone, FULL, num_microbatches=3, state=lora(16))
        yield from of(model, 4, alone, state=lora(16, "*.layers.1.*.linear_qkv", "*.layers.3.*.linear_fc2"))
        yield from of(model, 4, alone, state=lora(32, dropout=0.05, dropout_position="post"))
        yield from of(model, 2, alone, {}, state=lora(16) | FUSED_GRADIENTS)
        yield from of(model, 2, alone, {}, state=lora(16) | LOW_PRECISION)
        yield from of(model, 2, alone, {}, state=lora(16) | UNFUSED_ACTIVATION)
    yield from adapters_of_ms_swift(of, (alone,))
    yield from adapters_of_ms_swift_in_fp8(of, alone)
    yield from of(LLAMA, 2, alone, {}, FULL, state=lora(24) | OF_ALL_LINEARS)
    yield from of(QWEN, 2, alone, state=lora(24) | OF_ALL_LINEARS)
    yield from further_adapters(of, alone)
    yield from of(QWEN, 2, alone, {}, FULL, recompute("layernorm", "moe_act"), config=EXTRA, state=lora(16))
    yield from of(PHI, 2, alone, {}, FULL, config=EXTRA, state=lora(16))
    yield from of(GPT_OSS, 2, alone, state=lora(16))


def further_adapters(of: Callable[..., Iterator[Job]], alone: str) -> Iterator[Job]:
    """Yields jobs of the other kinds of Megatron-Bridge's adapters: of each expert, of other ranks, of parts."""
    for rank in (16, 20):  # torch multiplies all experts' rows at once where the rank is a multiple of 8
        yield from of(QWEN, 2, alone, {}, FULL, state=lora(rank, share_expert_adapters=False))
    yield from of(QWEN, 2, alone, state=lora(32, dropout=0.1, share_expert_adapters=False))
    yield from of(QWEN, 2, alone, state=lora(64, normalize_moe_lora=True, share_expert_adapters=False))
    yield from of(QWEN, 2, alone, {}, FULL, state=lora(64, normalize_moe_lora=True))
    yield from of(LLAMA, 4, alone, {}, FULL, state=lora(16, *OF_PARTS))
    yield from of(PHI, 2, alone, state=lora(32, *OF_PARTS, dropout=0.1))
    yield from of(QWEN, 2, alone, {}, FULL, state=lora(16, *OF_PARTS))
    for targets in (OF_LATENT_ATTENTION, (*OF_LATENT_ATTENTION, *OF_MLP)):
        yield from of(MOONLIGHT, 2, alone, {}, FULL, state=lora(8, *targets))
    for model in (LLAMA, QWEN):
        yield from of(model, 4, alone, {}, FULL, state=lora(16) | BLOCKWISE)
        yield from of(model, 2, alone, {}, FULL, state=lora(16) | TENSORWISE)
    yield from of(LLAMA, 2, alone, {}, state=lora(32, *OF_MLP) | BLOCKWISE)
    yield from of(PHI, 2, alone, recompute("mlp"), offload("core_attn"), state=lora(16) | BLOCKWISE)
    yield from of(QWEN, 2, alone, recompute("layernorm", "moe_act"), state=lora(8, *OF_ATTENTION) | BLOCKWISE)
    on_host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    yield from of(QWEN, 2, alone, state=lora(16) | on_host | {"use_precision_aware_optimizer": True})


def adapters_of_two_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of two ranks that train adapters, each kind of parallelism once."""
    for model in (LLAMA, PHI):
        yield from of(model, 4, "TP2", {}, FULL, state=lora(16))
    yield from of(LLAMA, 4, "DP2", state=lora(16))
    yield from of(LLAMA, 4, "TP2", {}, FULL, state=lora(16) | BLOCKWISE)
    yield from of(LLAMA, 4, "PP2", {}, FULL, num_microbatches=4, config=DEALLOCATE, state=lora(16))
    yield from of(QWEN, 4, "EP2 DP2", {}, FULL, state=lora(16))
    yield from of(QWEN, 2, "EP2 DP2", {}, FULL, state=lora(8) | {"moe_permute_fusion": False})
    yield from of(QWEN, 4, "TP2 EP2 ETP1", state=lora(16))
    yield from of(LLAMA, 4, "CP2", state=lora(16))
    yield from adapters_of_ms_swift(of, ("EP2 DP2", "TP2"))
    yield from of(LLAMA, 2, "TP2", {}, FULL, state=lora(24) | OF_ALL_LINEARS)
    yield from of(LLAMA, 4, "TP2", {}, FULL, state=lora(16, *OF_PARTS))
    yield from of(QWEN, 2, "EP2 DP2", {}, FULL, state=lora(16, share_expert_adapters=False))
    yield from of(QWEN, 2, "EP2 DP2", state=lora(64, normalize_moe_lora=True))
    yield from adapters_beside_others(of, "TP2")
    yield from of(MOONLIGHT, 2, "TP2 EP2 ETP1", {}, FULL, state=lora(8, *OF_LATENT_ATTENTION))


def adapters_beside_others(of: Callable[..., Iterator[Job]], layout: str) -> Iterator[Job]:
    """Yields jobs of adapters with a head in place of the output layer, and in classic GPT."""
    yield from of(LLAMA, 4, layout, {}, FULL, state=CRITIC | lora(16))
    yield from of(GPT, 4, layout, state=lora(16), seq_length=2048)
    yield from of(GPT, 4, layout, {}, FULL, state=DROPS | lora(16, *OF_ATTENTION), seq_length=2048)


DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
UNFUSED_ATTENTION = {"attention_backend": "unfused"}
WHOLE_OPTIMIZER = {"use_distributed_optimizer": False}


def classic_gpt(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank of GPT as Megatron-LM's own tests train it, with and without dropout."""
    alone: dict[str, Any] = {"seq_length": 2048}
    one = GPT, 4, "one rank"
    yield from of(*one, {}, FULL, recompute("core_attn"), **alone)
    yield from of(*one, {}, FULL, recompute("core_attn"), state=DROPS, **alone)
    yield from of(*one, state={"hidden_dropout": 0.1}, **alone)
    yield from of(*one, {}, FULL, recompute("core_attn"), state=DROPS | UNFUSED_ATTENTION, **alone)
    yield from of(*one, state=UNFUSED_ATTENTION, **alone)
    yield from of(*one, {}, FULL, state=DROPS | FUSED_GRADIENTS, **alone)
    yield from of(*one, state=DROPS | WHOLE_OPTIMIZER, num_microbatches=3, **alone)
    yield from of(*one, state=DROPS | UNFUSED_ACTIVATION, **alone)
    yield from of(*one, state=UNFUSED_ACTIVATION, config={"add_bias_linear": False}, **alone)
    yield from of(*one, state=DROPS, config={"gated_linear_unit": True}, **alone)
    yield from of(*one, state=DROPS, config={"qk_layernorm": True}, **alone)
    yield from of(*one, config={"normalization": "RMSNorm"}, **alone)


NEXT_OF_64 = {"num_moe_experts": 64}
"""A quarter of the optimizer's state of an H200 in four layers of Qwen3-Next."""


def gated_delta_net(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one and two ranks of models with gated delta net: four layers are one period."""
    alone = "one rank"
    inside = recompute("core_attn", "layernorm", "moe_act", "shared_experts")
    out = offload("qkv_linear", "core_attn", "attn_proj")
    yield from of(QWEN_NEXT, 4, alone, {}, FULL, inside, out, config=NEXT_OF_64)
    yield from of(QWEN35_4B, 4, alone, {}, FULL, recompute("core_attn", "mlp"), out)
    yield from of(QWEN35_4B, 8, alone, {}, FULL, state=LOW_PRECISION)
    yield from of(QWEN35_4B, 4, alone, micro_batch_size=2, seq_length=2048)
    yield from of(QWEN35_4B, 4, alone, num_microbatches=3)
    yield from of(QWEN35_4B, 4, alone, {}, FULL, seq_length=16384)
    yield from of(QWEN_NEXT, 4, alone, config=NEXT_OF_64 | {"mtp_num_layers": 1})
    yield from of(QWEN_NEXT, 8, alone, FULL, config=NEXT_OF_64, state=LOW_PRECISION, num_microbatches=2)
    yield from of(QWEN35_9B, 4, alone, {}, FULL, state=LOW_PRECISION)
    yield from of(QWEN35_4B, 4, alone, {}, FULL, state={"fp8_format": "hybrid", "fp8_recipe": "tensorwise"})
    yield from of(QWEN35_4B, 4, "TP2", {}, FULL)
    yield from of(QWEN_NEXT, 4, "TP2 EP2 ETP1", {}, FULL, config=NEXT_OF_64)
    yield from of(QWEN_NEXT, 8, "PP2", config=NEXT_OF_64, num_microbatches=2)


OWN_LAYERS = {"transformer_impl": "local"}


def own_layers(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of one rank of GPT with Megatron's own layers in the place of Transformer Engine's."""
    alone: dict[str, Any] = {"seq_length": 2048}
    one = GPT, 4, "one rank"
    yield from of(*one, {}, FULL, recompute("core_attn"), state=DROPS | OWN_LAYERS, **alone)
    yield from of(*one, {}, FULL, state=OWN_LAYERS, **alone)
    yield from of(*one, state=OWN_LAYERS | UNFUSED_ACTIVATION, num_microbatches=3, **alone)
    yield from of(*one, state=OWN_LAYERS | WHOLE_OPTIMIZER, **alone)


def classic_gpt_of_two_ranks(of: Callable[..., Iterator[Job]]) -> Iterator[Job]:
    """Yields jobs of two ranks: whole sequences, tied embeddings over stages, a whole optimizer on each rank."""
    short: dict[str, Any] = {"seq_length": 2048, "state": DROPS}
    yield from of(GPT, 4, "PP2", num_microbatches=4, config=DEALLOCATE, seq_length=2048, state=DROPS | OWN_LAYERS)
    yield from of(GPT, 4, "TP2 SP0", {}, FULL, **short)
    yield from of(GPT, 4, "TP2", **short)
    yield from of(LLAMA, 4, "TP2 SP0")
    yield from of(GPT, 4, "PP2", num_microbatches=4, config=DEALLOCATE, **short)
    whole = {"seq_length": 2048, "state": DROPS | WHOLE_OPTIMIZER}
    yield from of(GPT, 4, "PP2", num_microbatches=4, config=DEALLOCATE, **whole)
    yield from of(GPT, 4, "DP2", **whole)
