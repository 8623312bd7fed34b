"""Which models, workloads and settings Transformer Engine and Megatron refuse to multiply in FP8.

Read in Transformer Engine 2.12.0 (``assert_dim_for_fp8_exec`` and ``assert_dim_for_all_gather`` of
``transformer_engine/pytorch/utils.py``, `MXFP8Quantizer`) and in ``transformer_config.py`` of megatron-core 0.16.1.
"""

from __future__ import annotations

import math

from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError

_ROWS, _WIDTH = 8, 16
"""What rows and columns of a matrix in FP8 must divide by; cuBLAS reads the transposed matrix in rows of 16 bytes."""
_MX_BLOCK = 32
_GATHERED_BLOCK = {"blockwise": 128, "mxfp8": _MX_BLOCK}
"""What a rank's part of a matrix must divide by to be gathered in FP8, by recipe."""


def check_fp8(
    state: TrainingState, architecture: Architecture, layout: Layout, *, dtype: str, tokens_of_rank: int
) -> None:
    """Checks dtype and sizes of a scenario with FP8; its arguments are the scenario's.

    Raises:
        ValueError: If Transformer Engine cannot multiply one of the matrices in FP8.
    """
    if state.fp8_format is None:
        return
    if dtype != "bf16":
        raise RuleError(
            f"dtype is {dtype!r}, must be 'bf16' with fp8_format {state.fp8_format!r}, because the products "
            "of FP8 matrices are stored in bf16: choose dtype 'bf16', or leave fp8_format out",
            *("dtype", "fp8_format"),
        )
    has_no_fp8 = architecture.normalization == "LayerNorm" or (architecture.add_bias_linear and not architecture.routes)
    if has_no_fp8 or (architecture.add_bias_linear and state.lora is not None):
        beside = "" if has_no_fp8 else "adapters and "
        raise RuleError(
            f"fp8_format is {state.fp8_format!r}, and {architecture.name} has {beside}LayerNorm or biases of all "
            "matrices, which memlab does not predict in FP8: leave fp8_format out",
            "fp8_format",
        )
    if layout.has_whole_sequences:
        raise RuleError(
            f"fp8_format is {state.fp8_format!r} without sequence_parallel, which memlab does not predict: switch "
            "sequence_parallel on, or leave fp8_format out",
            *("fp8_format", "sequence_parallel"),
        )
    multiple, sizes = _multiple_of_sizes(state), _sizes(architecture, layout)
    if state.lora is not None and state.lora.library == "mcore_bridge" and not state.fp8_param_gather:
        # Its adapters are linears of Transformer Engine in the layers' FP8 context, which it leaves for them only
        # beside FP8 parameters (``LoraParallelLinear`` in ``tuners/lora.py`` of mcore-bridge 1.6.5). Megatron-Bridge's
        # are Megatron-Core's, which compute in bf16.
        sizes["lora_rank"] = state.lora.rank
    for name, size in sizes.items():
        if size % multiple:
            raise RuleError(
                f"{name} is {size}, must be a multiple of {multiple} under fp8_recipe {state.fp8_recipe!r}: choose "
                f"another {'rank' if name == 'lora_rank' else 'model or layout'}, or leave fp8_format out",
                *("fp8_format", "fp8_recipe"),
            )
    required = required_multiple_of_tokens(state, layout)
    if tokens_of_rank % required:
        raise RuleError(
            f"a rank holds {tokens_of_rank} tokens of a micro-batch, must be a multiple of {required} under fp8_recipe "
            f"{state.fp8_recipe!r}: change seq_length or micro_batch_size, or leave fp8_format out",
            *("fp8_recipe", "seq_length", "micro_batch_size"),
        )


def required_multiple_of_tokens(state: TrainingState, layout: Layout) -> int:
    """Returns what the tokens that a rank holds of a micro-batch must be a multiple of; 1 without FP8."""
    if state.fp8_format is None:
        return 1
    ranks, multiple = layout.tensor_model_parallel_size, _multiple_of_sizes(state)
    part = _GATHERED_BLOCK.get(state.fp8_recipe, _ROWS) if ranks > 1 else multiple
    return math.lcm(part, multiple // math.gcd(multiple, ranks))


def _multiple_of_sizes(state: TrainingState) -> int:
    return _MX_BLOCK if state.fp8_recipe == "mxfp8" else _WIDTH


def _sizes(model: Architecture, layout: Layout) -> dict[str, int]:
    """Returns the sizes of one rank's weight matrices by their names; routers and gates are multiplied in bf16."""
    shared = (size for size in model.shared_sizes if size.is_of_a_matrix)
    sizes = {f"{size.field} on a rank": size.amount // layout.ranks_that_share(size) for size in shared}
    matrices = {weight for part in model.parts for weight in part.weights() if weight.is_matrix}
    sides = {
        f"the number of {side} of {weight.name} on a rank": size
        for weight in sorted(matrices, key=lambda weight: weight.name)
        if weight.name not in ("mlp.router.weight", "mlp.shared_experts.gate_weight")
        for side, size in zip(("rows", "columns"), layout.shape_of(weight), strict=True)
    }
    return {"hidden_size": model.hidden_size} | sizes | sides


_NEEDS_ORIGINAL_INPUT = (("recompute_modules", ("moe_act", "layernorm")), ("offload_modules", ("expert_fc1",)))
_OFFLOADS_A_WEIGHT = ("qkv_linear", "attn_proj", "expert_fc1")
"""Offload modules with a linear inside, which saves its weight in FP8 for backward."""


def check_fp8_settings(settings: MemorySettings, state: TrainingState) -> None:
    """Checks memory settings against FP8.

    Raises:
        ValueError: If a setting needs the input of a linear saved as it is, which the delayed recipe cannot; if a
            remedy acts on Megatron's checkpoints, which FP8 replaces by TE's; or if Megatron would offload a weight in
            FP8: it comes back in bf16, and TE's matrix product fails (seen on an H200).
    """
    if state.fp8_format is None:
        return
    if state.fp8_recipe == "delayed":
        for field, refused in _NEEDS_ORIGINAL_INPUT:
            for name in refused:
                if name in (getattr(settings, field) or ()):
                    raise RuleError(
                        f"{field} has {name!r}, which the FP8 recipe 'delayed' does not support, since it cannot save "
                        f"a linear's input unquantized: choose fp8_recipe 'tensorwise' or 'blockwise', or leave "
                        f"{name!r} out",
                        *(field, "fp8_recipe"),
                    )
    if settings.checkpoint_input_remedy in ("clear_gradient", "release_storage"):
        raise RuleError(
            f"checkpoint_input_remedy is {settings.checkpoint_input_remedy!r} under FP8, where layers are checkpointed "
            "by Transformer Engine, must be 'detach': choose that, or leave checkpoint_input_remedy out",
            *("checkpoint_input_remedy", "fp8_format"),
        )
    moved = [name for name in ("offload_parameters", "offload_gradients") if getattr(settings, name)]
    if moved and state.reuse_grad_buf_for_mxfp8_param_ag:
        raise RuleError(
            f"{moved[0]} is True with reuse_grad_buf_for_mxfp8_param_ag, which memlab does not predict together, since "
            "parameters and gradients share a buffer: leave one of the two out",
            *(moved[0], "reuse_grad_buf_for_mxfp8_param_ag"),
        )
    weights = [name for name in settings.offload_modules or () if name in _OFFLOADS_A_WEIGHT]
    if weights and not state.fp8_param_gather:
        raise RuleError(
            f"offload_modules has {weights} under FP8, must have none of {', '.join(_OFFLOADS_A_WEIGHT)}: Megatron "
            "would offload the linear's FP8 weight too, and Transformer Engine's matrix product then fails: leave them "
            "out, or set fp8_param_gather",
            *("offload_modules", "fp8_param_gather"),
        )
