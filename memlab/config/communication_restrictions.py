"""Which models and workloads the libraries refuse that communicate for Megatron: user buffers, DeepEP and HybridEP.

`memlab.config.user_buffers` and `memlab.config.exchange_buffers` name the versions that were read.
"""

from __future__ import annotations

from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError

_MOST_RANKS = 8
"""Without multicast (``userbuffers-host.cpp``); memlab does not know which GPUs have it."""
RANKS_OF_A_NODE = 8
"""That reach one another by NVLink (``NUM_MAX_NVL_PEERS`` of DeepEP). HybridEP asks the driver; more of them reach one
another in a GB200 NVL72, for example."""
OF_DEEP_EP = {
    2: (256, (6, 6)),
    4: (256, (6, 6)),
    8: (256, (6, 6)),
    16: (288, (20, 12)),
    24: (288, (32, 8)),
    32: (288, (32, 8)),
    64: (288, (28, 20)),
    128: (560, (32, 12)),
    144: (720, (12, 8)),
    160: (720, (12, 8)),
}
"""By the number of ranks: tokens in flight of a channel by NVLink, and those that dispatch and combine send at once by
network (``get_dispatch_config`` and ``get_combine_config``)."""


def check_user_buffers(state: TrainingState, architecture: Architecture, layout: Layout, dtype: str) -> None:
    """Checks that Transformer Engine takes a scenario's user buffers, and that memlab knows its layers with them.

    Raises:
        RuleError: If not.
    """
    if not (state.tp_comm_overlap and layout.tensor_model_parallel_size > 1):
        return
    if layout.has_whole_sequences:
        raise RuleError(
            "tp_comm_overlap is True without sequence_parallel, must have it by a rule of Megatron-LM: switch "
            "sequence_parallel on, or leave tp_comm_overlap out",
            *("tp_comm_overlap", "sequence_parallel"),
        )
    if layout.tensor_model_parallel_size > _MOST_RANKS:
        raise RuleError(
            f"tp_comm_overlap is True with tensor_model_parallel_size {layout.tensor_model_parallel_size}, must have "
            f"at most {_MOST_RANKS}, by a rule of Transformer Engine without NVLink multicast: choose fewer, or leave "
            "tp_comm_overlap out",
            *("tp_comm_overlap", "tensor_model_parallel_size"),
        )
    if dtype != "bf16":
        raise RuleError(
            f"tp_comm_overlap is True with dtype {dtype!r}, must be bf16, the type for which Megatron makes user "
            "buffers: choose bf16, or leave tp_comm_overlap out",
            *("tp_comm_overlap", "dtype"),
        )
    if state.fp8_format is not None and state.fp8_recipe == "blockwise":
        raise RuleError(
            "tp_comm_overlap is True with fp8_recipe 'blockwise', which Transformer Engine's user buffers do not take: "
            "choose another recipe, or leave tp_comm_overlap out",
            *("tp_comm_overlap", "fp8_recipe"),
        )
    if architecture.multi_latent_attention:
        # ``TELinear`` switches the option off in the model's config at the first linear whose buffer it does not know.
        raise RuleError(
            f"tp_comm_overlap is True, and {architecture.name} has latent attention, with which Megatron-Core switches "
            "it off for all linears but the first, and memlab does not predict that: leave it out",
            "tp_comm_overlap",
        )
    if state.mtp_num_layers:
        raise RuleError(
            f"tp_comm_overlap is True with mtp_num_layers {state.mtp_num_layers}, whose projection has no user buffer, "
            "on which Megatron-Core fails: leave one of the two out",
            *("tp_comm_overlap", "mtp_num_layers"),
        )
    for name, is_refused in (
        ("lora_rank", state.lora is not None),
        ("teacher_model", state.teacher_model is not None),
        ("moe_shared_expert_overlap", state.moe_shared_expert_overlap),
        ("transformer_impl", state.transformer_impl != "transformer_engine"),
        ("tp_comm_overlap_rs_dgrad", state.tp_comm_overlap_rs_dgrad and state.fp8_format is not None),
    ):
        if is_refused:
            other = " and fp8_format" if name == "tp_comm_overlap_rs_dgrad" else ""
            raise RuleError(
                f"tp_comm_overlap is True with {name}{other}, which memlab does not predict together: leave one of "
                "them out",
                *("tp_comm_overlap", name),
            )


def check_exchange(state: TrainingState, architecture: Architecture, layout: Layout, dtype: str) -> None:
    """Checks that Megatron-Core, DeepEP and HybridEP take a scenario with the ``flex`` dispatcher.

    Raises:
        RuleError: If not.
    """
    ranks = layout.ranks_of_exchange
    if state.moe_token_dispatcher_type != "flex" or not architecture.routes:
        return
    option, backend = "moe_token_dispatcher_type", state.moe_flex_dispatcher_backend
    if ranks == 1:
        raise RuleError(
            f"{option} is 'flex' with expert_model_parallel_size 1 and expert_tensor_parallel_size 1, must have more "
            "ranks by a rule of Megatron-Core: spread the experts, or choose alltoall",
            *(option, "expert_model_parallel_size"),
        )
    if dtype != "bf16":
        raise RuleError(
            f"{option} is 'flex' with dtype {dtype!r}, must be bf16, which DeepEP and HybridEP combine: choose "
            "bf16, or alltoall",
            *(option, "dtype"),
        )
    if backend == "hybridep":
        is_whole = ranks <= RANKS_OF_A_NODE or ranks % RANKS_OF_A_NODE == 0
        if not is_whole or architecture.sent_size % 16:
            raise RuleError(
                f"moe_flex_dispatcher_backend is 'hybridep' with {ranks} ranks that share the experts and tokens of "
                f"{architecture.sent_size} columns, must be at most {RANKS_OF_A_NODE} or a multiple of it, and a "
                "multiple of 16: choose another expert_model_parallel_size, or alltoall",
                *("moe_flex_dispatcher_backend", "expert_model_parallel_size"),
            )
        return
    if ranks not in OF_DEEP_EP:
        raise RuleError(
            f"moe_flex_dispatcher_backend is 'deepep' with {ranks} ranks that share the experts, must be one of "
            f"{', '.join(map(str, OF_DEEP_EP))} by a rule of DeepEP: choose another expert_model_parallel_size, "
            "hybridep, or alltoall",
            *("moe_flex_dispatcher_backend", "expert_model_parallel_size"),
        )
    if state.moe_deepep_num_sms % 2:
        raise RuleError(
            f"moe_deepep_num_sms is {state.moe_deepep_num_sms}, must be even by a rule of DeepEP: choose "
            f"{state.moe_deepep_num_sms - 1}",
            "moe_deepep_num_sms",
        )
    if state.moe_pad_expert_input_to_capacity:
        raise RuleError(
            "moe_flex_dispatcher_backend is 'deepep' with moe_pad_expert_input_to_capacity, which Megatron-Core "
            "refuses: choose hybridep, or leave it out",
            *("moe_flex_dispatcher_backend", "moe_pad_expert_input_to_capacity"),
        )
