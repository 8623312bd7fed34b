"""The model of transformers that an architecture describes: its config, its class, and the attention of each place."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from memlab.config.architectures import Architecture
from memlab.config.scenario import Scenario
from memlab.engines.megatron.layers.flash_attention import flash_attention_of_torch

ATTENTION, UNFUSED_ATTENTION = "memlab_causal", "memlab_causal_unfused"
"""The names under which transformers finds `_attention` and `_unfused_attention`. They have no mask function there, so
that no mask is made."""


def check_installed() -> None:
    """Checks that transformers is there, and that its models can be imported.

    With pillow and torchvision installed, transformers 5.24 imports torchvision for text models too, and a torchvision
    that was built for another torch fails (Colab, after pip has replaced its torch).

    Raises:
        ValueError: If not.
    """
    if find_spec("transformers") is None:
        raise ValueError(
            "engine is 'fsdp2', which needs the package transformers, and it is not installed here: pip install "
            "'memlab[fsdp2]', or choose engine 'megatron'"
        )
    try:
        from transformers import AttentionInterface  # noqa: F401
    except (ImportError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(
            f"engine is 'fsdp2', and the models of the package transformers do not import here ({cause}): take the "
            f"torchvision of torch {torch.__version__} or uninstall it, or pip install 'memlab[fsdp2]'"
        ) from error


def config_of(architecture: Architecture, num_layers: int, longest_sequence: int) -> Any:
    """Returns transformers' config of an architecture's first layers.

    Args:
        architecture: A dense one.
        num_layers: How many layers are built.
        longest_sequence: Tokens of the longest sequence.
    """
    from transformers import AutoConfig

    sizes = architecture
    channels = {"head_dim": sizes.kv_channels} if sizes.family not in ("phi3", "qwen2") else {}
    experts = {}
    if sizes.routes:
        experts = {
            "num_experts": sizes.num_moe_experts,
            "num_experts_per_tok": sizes.moe_router_topk,
            "moe_intermediate_size": sizes.moe_ffn_hidden_size,
            "norm_topk_prob": not sizes.moe_router_pre_softmax,
        }
    window = {"sliding_window": None} if sizes.family in ("mistral", "phi3") else {}
    rope = {"rope_type": "default", "rope_theta": sizes.rotary_base, "partial_rotary_factor": sizes.rotary_percent}
    return AutoConfig.for_model(
        sizes.family,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_query_groups,
        max_position_embeddings=longest_sequence,
        rms_norm_eps=sizes.layernorm_epsilon,
        tie_word_embeddings=sizes.share_embeddings_and_output_weights,
        rope_parameters=rope,
        attention_dropout=0.0,
        use_cache=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **channels,
        **window,
        **experts,
    )


def build_model(scenario: Scenario, dtype: torch.dtype, *, attention: str) -> Any:
    """Returns transformers' own model of a scenario, in training mode, on torch's default device.

    Args:
        scenario: What to build.
        dtype: Of the parameters.
        attention: A name of transformers' attention functions.

    Raises:
        ValueError: If the architecture has parts that transformers' model of its family does not have.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    AttentionInterface.register(UNFUSED_ATTENTION, _unfused_attention)
    config = config_of(scenario.architecture, scenario.num_layers, scenario.seq_length)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    built, expected = model.num_parameters(), scenario.architecture.with_layers(scenario.num_layers).num_parameters
    if built != expected:
        raise ValueError(
            f"{scenario.architecture.name} has {expected:,} parameters, and transformers' {type(model).__name__} of "
            f"these sizes has {built:,}, so it is another model: choose a model as published, or engine 'megatron'"
        )
    return model.train()


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attends as ``scaled_dot_product_attention`` does with its flash kernel, where there is no such kernel.

    Args:
        module: transformers' attention.
        query: Shape [batch, heads, tokens, channels].
        key: The same, of as many or fewer heads.
        value: Like `key`.
        mask: None, since the attention is causal.
        **options: ``scaling`` of the scores; the dropout is 0.
    """
    assert mask is None and not options.get("dropout"), "causal attention without dropout"
    return flash_attention_of_torch(query, key, value, options["scaling"]), None


def _unfused_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attends as ``scaled_dot_product_attention`` does on a GPU in fp32 with fewer heads of keys than of queries.

    Of its kernels, those that take fp32 do not take fewer heads, so that it multiplies and keeps whole matrices of
    scores (torch 2.11, seen on an H200). The arguments are those of `_attention`.
    """
    assert mask is None and not options.get("dropout"), "causal attention without dropout"
    attend = torch.ops.aten._scaled_dot_product_attention_math
    output, probabilities = attend(query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True)
    if probabilities.grad_fn is not None:
        _hold_temporary_of_softmax(probabilities.grad_fn)
    return output.transpose(1, 2).contiguous(), None


def _hold_temporary_of_softmax(backward: Any) -> None:
    """Holds a tensor while a softmax's backward runs: CUDA's multiplies gradient and output into one of its own.

    Nothing of it is seen on fake tensors (``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu).
    """
    held: list[torch.Tensor] = []
    backward.register_prehook(lambda gradients: held.append(torch.empty_like(gradients[0])))
    backward.register_hook(lambda *_: held.clear())
