"""What a step runs: an architecture, reduced to some layers, with a workload, spread over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture, find_architecture
from memlab.config.communication_restrictions import check_exchange, check_user_buffers
from memlab.config.fp8_restrictions import check_fp8
from memlab.config.from_json import build
from memlab.config.fsdp2_rules import Fsdp2Rules
from memlab.config.layout import Layout
from memlab.config.lora import (
    EXTRA_LAYER,
    EXTRA_LAYERS,
    LINEARS,
    NAMES_OF_TRANSFORMERS,
    OF_LATENT_ATTENTION,
    OUTPUT_LAYER,
    PARTS,
    LoRA,
)
from memlab.config.option import EngineName, check_engine, check_options, option
from memlab.config.parts.mtp import joining_weights
from memlab.config.parts.part import Weight
from memlab.config.pipeline_layout import extra_layers
from memlab.config.routing import Routing, find_routing
from memlab.config.training_state import TrainingState
from memlab.config.validation import (
    MOST_LAYERS,
    MOST_TOKENS_OF_A_SEQUENCE,
    RuleError,
    check_whole_number,
    refuse_beside,
    shortened,
)
from memlab.config.versions import OLDER_FILES, Versions

Dtype = Literal["bf16", "fp32"]
WORKLOAD = ("seq_length", "micro_batch_size", "num_microbatches")
"""Fields that may change on a live model."""
_BOTH: dict[str, tuple[EngineName, ...]] = {"engines": ("megatron", "fsdp2")}
_KINDS: dict[str, type] = {
    "architecture": Architecture,
    "layout": Layout,
    "routing": Routing,
    "state": TrainingState,
    "allocator": AllocatorSettings,
    "versions": Versions,
}
_BY_NAME: dict[type, str] = {
    Layout: ", or write Layout.from_text('TP2 DP4')",
    **dict.fromkeys((Architecture, Routing), ", or use Scenario.of, which takes a name or a path"),
}
"""How else to give what has to be of one of these types."""
_NOT_BESIDE_OWN_LAYERS = (
    *("dtype", "context_parallel_size", "packed_sequences", "lora_rank", "attention_backend", "fp8_format"),
    *("mtp_num_layers", "create_attention_mask", "reference_model", "num_labels"),
)
"""Options that memlab does not predict beside Megatron's own layers."""
LONGEST_OF_SOFTMAX_KERNEL = 4096
"""Keys for which Megatron has its own kernel of the softmax."""
_MOST_TOKENS_OF_A_MICRO_BATCH = 2**26
"""Every backend holds a batch's token numbers in host memory: 0.5 GiB at this limit."""
_MOST_ELEMENTS_OF_AN_ACTIVATION = 2**50
"""A tensor of so many elements takes 4 PiB in fp32. Torch counts bytes in 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(Fsdp2Rules):
    """What a step runs: architecture, layers, workload, layout, training state and options of torch's allocator.

    Memory settings are not part of a scenario, because they change on a live model.

    Raises:
        ValueError: If a value is not of its type or range.
    """

    architecture: Architecture
    num_layers: int = option(
        MISSING, "build only the first N layers of the model (default: all)", at_most=MOST_LAYERS, **_BOTH
    )
    seq_length: int = option(
        MISSING,
        "tokens in a sequence (default: depends on ARCH)",
        group="Workload",
        label="tokens",
        at_most=MOST_TOKENS_OF_A_SEQUENCE,
        **_BOTH,
    )
    micro_batch_size: int = option(
        1, "sequences in a micro-batch (default 1)", group="Workload", label="micro-batch", at_most=2**16, **_BOTH
    )
    num_microbatches: int = option(1, "micro-batches in a step (default 1)", at_most=2**14, **_BOTH)
    """Passes whose gradients are accumulated before one optimizer step."""
    packed_sequences: int | None = option(
        None,
        "pack N sequences of about equal length into a micro-batch of one row; `seq_length` is then the number of "
        "tokens in the row (default: each sequence has a row of its own). Under context parallelism, `seq_length` "
        "must be a multiple of twice the context parallel size; memlab makes each sequence's length such a multiple",
        **_BOTH,
    )
    """Megatron's ``PackedSeqParams``, format ``thd``; transformers' ``position_ids`` that begin anew."""
    seed: int = option(1234, "seed of the weights and the data (default 1234)", at_least=0, **_BOTH)
    """Every step uses the same batch."""
    dtype: Dtype = option("bf16", "type of parameters and activations (default bf16)", **_BOTH)
    engine: EngineName = option(
        "megatron",
        "what trains: Megatron-Core, or fsdp2, which is torch's fully_shard over the model of Hugging Face's "
        "transformers (default megatron)",
        **_BOTH,
    )
    layout: Layout = field(default_factory=Layout)
    """How the job is spread over ranks."""
    routing: Routing = field(default_factory=Routing)
    """Which experts the tokens go to on the simulated backend; on other backends the router decides."""
    expert_buffers: bool = option(
        False,
        "keep the parameters and gradients of the experts in separate buffers, as Megatron does under expert "
        "parallelism",
    )

    state: TrainingState = field(default_factory=TrainingState)
    """Precision and place of gradients and optimizer state, and how loss, attention and matrices are computed."""
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    """Options of torch's allocator; a process on a GPU has those that it was started with."""
    versions: Versions = field(default_factory=Versions)
    """The libraries of the machines where the job runs; a process on a GPU has the installed ones."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(value := getattr(self, name), kind):
                by_name = _BY_NAME.get(kind, "")
                raise ValueError(
                    f"{name} is {shortened(value)}, must be {kind.__name__}(...): name its fields{by_name}"
                )
        check_options(self)
        self._check_engine()
        tokens = self.seq_length * self.micro_batch_size
        if tokens > _MOST_TOKENS_OF_A_MICRO_BATCH:
            raise RuleError(
                f"micro_batch_size {self.micro_batch_size} x seq_length {self.seq_length} is {tokens:,} tokens, must "
                f"be at most {_MOST_TOKENS_OF_A_MICRO_BATCH:,} (more than any real job has): give fewer or "
                "shorter sequences",
                *("micro_batch_size", "seq_length"),
            )
        largest_row = self.architecture.largest_row
        if tokens * largest_row > _MOST_ELEMENTS_OF_AN_ACTIVATION:
            raise RuleError(
                f"the largest activation has {tokens:,} tokens x {largest_row:,} elements, must be at most "
                f"{_MOST_ELEMENTS_OF_AN_ACTIVATION:,} elements in all (more than any real job has): give fewer or "
                "shorter sequences",
                *("seq_length", "micro_batch_size"),
            )
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}, must be below 2**63: give a smaller one")
        if self.state.optimizer_cpu_offload and self.dtype != "bf16":
            # Its main parameters are then views of the parameters, and torch.optim.Optimizer refuses tensors that are
            # not leaves (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, 0.16.1 and 0.19.2).
            raise RuleError(
                f"dtype is {self.dtype!r} with optimizer_cpu_offload, must be bf16, because Megatron's CPU optimizer "
                "takes no fp32 parameters: choose bf16, or leave optimizer_cpu_offload out",
                *("dtype", "optimizer_cpu_offload"),
            )
        patterns = {
            "moe_layer_freq": ("experts", self.architecture.moe_layer_freq),
            "window_attn_skip_freq": ("a window", self.architecture.window_attn_skip_freq),
            "hybrid_override_pattern": ("which part", tuple(self.architecture.hybrid_override_pattern or ()) or None),
            "linear_attention_freq": ("linear attention", self.architecture.linear_attention_freq),
        }
        for name, (what, pattern) in patterns.items():
            if isinstance(pattern, tuple) and self.num_layers > len(pattern):
                raise RuleError(
                    f"num_layers is {self.num_layers}, must be at most {len(pattern)}, since {name} of "
                    f"{self.architecture.name} says which of so many layers have {what}: give fewer layers",
                    "num_layers",
                )
        self._check_architecture()
        self._check_hybrid()
        self._check_capacity()
        self._check_extra_layers()
        self._check_reference_model()
        self._check_largest_logits()
        self._check_entropy()
        self.layout.check(self.architecture, self.num_layers, self.seq_length, self.num_microbatches, self.engine)
        self._check_graphs()
        self._check_experts()
        self._check_adapters()
        self._check_attention()
        self._check_packing()
        self._check_mask()
        chunks = self.layout.virtual_pipeline_model_parallel_size
        if self.state.overlap_param_gather_with_optimizer_step and chunks == 1:
            raise RuleError(
                "overlap_param_gather_with_optimizer_step is True with virtual_pipeline_model_parallel_size 1, must "
                "have more, since Megatron-Core then builds an optimizer of the other chunks, and there are none: "
                "leave it out",
                *("overlap_param_gather_with_optimizer_step", "virtual_pipeline_model_parallel_size"),
            )
        check_fp8(self.state, self.architecture, self.layout, dtype=self.dtype, tokens_of_rank=self.tokens_of_rank)
        check_user_buffers(self.state, self.architecture, self.layout, self.dtype)
        check_exchange(self.state, self.architecture, self.layout, self.dtype)

    @property
    def teacher(self) -> Scenario:
        """The frozen model that a loss compares with, in the same layout and with the same workload."""
        name = self.state.teacher_model
        model = self.architecture if name is None else find_architecture(name)
        of_trained: dict[str, Any] = {"loss": "cross_entropy", "fp32_output": False, "lora": None}
        of_trained |= {"lm_loss_beside": False}
        state = replace(self.state, reference_model="none", teacher_model=None, **of_trained)
        layers = self.num_layers if name is None else model.num_layers
        of_experts: dict[str, Any] = {} if model.routes else {"routing": Routing(), "expert_buffers": False}
        return replace(self, architecture=model, num_layers=layers, state=state, **of_experts)

    def _check_reference_model(self) -> None:
        chunks, name = self.layout.virtual_pipeline_model_parallel_size, self.state.teacher_model
        if self.state.reference_model != "none" and chunks > 1:
            # Model Optimizer's and ms-swift's teachers refuse chunks themselves.
            raise RuleError(
                f"reference_model is {self.state.reference_model!r} with virtual_pipeline_model_parallel_size "
                f"{chunks}, which memlab does not predict together: choose 1, or none",
                *("reference_model", "virtual_pipeline_model_parallel_size"),
            )
        if name is None:
            return
        try:
            model = self.teacher.architecture
        except ValueError as error:
            raise RuleError(f"teacher_model is {shortened(name)}: {error}", "teacher_model") from error
        if model.vocab_size != self.architecture.vocab_size:
            raise RuleError(
                f"teacher_model is {shortened(name)} with a vocabulary of {model.vocab_size}, must have that of "
                f"{self.architecture.name}, {self.architecture.vocab_size}, since the loss compares logit by logit: "
                "choose another teacher",
                *("teacher_model", "loss"),
            )
        self.layout.check(model, model.num_layers, self.seq_length, self.num_microbatches)

    def _check_largest_logits(self) -> None:
        """Checks that there are as many logits as ms-swift's GKD compares with: ``torch.topk`` fails otherwise.

        A teacher on the GPUs takes the largest of each rank's part (``vocab_parallel_topk`` in
        swift/megatron/trainers/gkd_utils.py, 3602360), a server those of the whole vocabulary.
        """
        k, is_server = self.state.gkd_logits_topk, self.state.reference_model == "none"
        ranks = 1 if is_server else self.layout.tensor_model_parallel_size
        most = self.architecture.vocab_size // ranks
        if k is not None and self.state.loss == "jsd" and k > most:
            whose = "of the vocabulary" if ranks == 1 else f"that each of {ranks} tensor parallel ranks has"
            raise RuleError(
                f"gkd_logits_topk is {k}, must be at most {most}, the logits {whose}: choose fewer",
                *("gkd_logits_topk", "tensor_model_parallel_size"),
            )
        k, most = self.state.logit_kl_topk, self.architecture.vocab_size
        if k is not None and self.state.loss == "logits_kl" and k > most:  # ``TopKLogitsKLLoss``
            raise RuleError(
                f"logit_kl_topk is {k}, must be at most the {most} logits of the vocabulary, by a rule of Model "
                "Optimizer: choose fewer",
                "logit_kl_topk",
            )

    def _check_entropy(self) -> None:
        """Checks that an entropy with a gradient has one chunk: each part's backward writes into the logits of all.

        torch then refuses the next one: *modified by an inplace operation* (``_VocabParallelEntropy`` in
        verl/utils/megatron/tensor_parallel.py, 0.9.1 and 1dda039b).
        """
        size, tokens = self.state.entropy_chunk_size, self.seq_length // self.layout.context_parallel_size
        if self.state.entropy_loss and size is not None and size < tokens:
            raise RuleError(
                f"entropy_chunk_size is {size} with entropy_loss, must be at least the {tokens} tokens of a row, since "
                "verl's backward of several chunks fails: give a larger one, or leave one of the two out",
                *("entropy_chunk_size", "entropy_loss"),
            )

    def _check_architecture(self) -> None:
        model = self.architecture
        if model.max_position_embeddings is not None and self.seq_length > model.max_position_embeddings:
            raise RuleError(
                f"seq_length is {self.seq_length}, must be at most max_position_embeddings of {model.name}, "
                f"{model.max_position_embeddings}, since its positions are learned: give shorter sequences",
                "seq_length",
            )
        has_gelu = not (model.gated_linear_unit or model.squared_relu)  # Megatron-Core has no fused squared ReLU
        if has_gelu and not model.add_bias_linear and self.state.bias_activation_fusion:
            # ``TransformerConfig.__post_init__`` of megatron-core 0.16.1 and 0.19.2.
            raise RuleError(
                f"bias_activation_fusion is True, must be False for {model.name}, which has GELU and no biases, by a "
                "rule of Megatron-Core: switch bias_activation_fusion off",
                "bias_activation_fusion",
            )

    def _check_hybrid(self) -> None:
        """Refuses what memlab does not predict of a model with layers of Mamba."""
        if self.architecture.hybrid_override_pattern is None:
            return
        state, others = self.state, {"packed_sequences": self.packed_sequences is not None}
        others |= {"context_parallel_size": self.layout.context_parallel_size > 1}
        others |= {"mtp_num_layers": bool(state.mtp_num_layers), "cuda_graph_impl": state.cuda_graph_impl != "none"}
        others |= {"transformer_impl": state.transformer_impl == "local", "fp8_format": state.fp8_format is not None}
        for name, is_on in others.items():
            if is_on:
                raise RuleError(
                    f"{name} is set, which memlab does not predict of {self.architecture.name}, a model with layers of "
                    f"Mamba: leave {name} out",
                    name,
                )

    def _check_capacity(self) -> None:
        """Checks that an expert that is padded has a capacity, and no more rows than there are tokens.

        ``TransformerConfig.__post_init__`` refuses the former, and ``permute`` fails with the latter
        (megatron/core/transformer/moe/moe_utils.py, 0.16.1).
        """
        factor, experts = self.state.moe_expert_capacity_factor, self.architecture.num_moe_experts
        if experts is None or not self.state.moe_pad_expert_input_to_capacity:
            return
        if factor is None:
            raise RuleError(
                "moe_pad_expert_input_to_capacity is True, must have moe_expert_capacity_factor, by a rule of "
                "Megatron-Core: give a factor, or do not pad",
                *("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor"),
            )
        most = experts / self.architecture.moe_router_topk
        if factor > most:
            raise RuleError(
                f"moe_expert_capacity_factor is {factor:g} with moe_pad_expert_input_to_capacity, must be at most "
                f"{most:g} (experts / moe_router_topk), since Megatron-Core then pads an expert to more rows than "
                "there are tokens, and fails: give a smaller one, or do not pad",
                *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
            )

    def _check_extra_layers(self) -> None:
        text, number = self.layout.pipeline_model_parallel_layout, self.state.mtp_num_layers or 0
        if isinstance(text, str) and extra_layers(text) != number:
            raise RuleError(
                f"pipeline_model_parallel_layout is {shortened(text)}, must have {number} m, one for each of "
                "mtp_num_layers, by a rule of Megatron-Core: correct one of them",
                *("pipeline_model_parallel_layout", "mtp_num_layers"),
            )

    def _check_engine(self) -> None:
        for settings in (self, self.layout, self.state):
            check_engine(settings, self.engine)
        if self.engine == "megatron":
            self._check_parts_of_megatron()
        else:
            self.check_on_fsdp2()

    def _check_parts_of_megatron(self) -> None:
        if self.architecture.experimental_attention_variant is not None:
            self._check_gated_delta_net()
        if self.architecture.only_in_transformers:
            raise RuleError(
                f"engine is 'megatron', and {self.architecture.name} is of the family {self.architecture.family}, "
                f"whose {self.architecture.only_in_transformers} memlab has in transformers' model only: choose engine "
                "'fsdp2'",
                "engine",
            )

    def _check_gated_delta_net(self) -> None:
        """Refuses what Megatron-Core 0.16.1 refuses (``transformer_config.py`` and ``ssm/gated_delta_net.py``)."""
        for name, value, only in (
            ("context_parallel_size", self.layout.context_parallel_size, 1),
            ("packed_sequences", self.packed_sequences, None),
            ("transformer_impl", self.state.transformer_impl, "transformer_engine"),
        ):
            if value != only:
                raise RuleError(
                    f"{name} is {value!r}, must be {'left out' if only is None else repr(only)} for "
                    f"{self.architecture.name}, by a rule of Megatron-Core 0.16.1 for gated delta net: correct it, or "
                    "choose another model",
                    name,
                )

    @property
    def keeps_scores(self) -> bool:
        """Whether attention keeps the probability of every pair of tokens for backward."""
        return self.state.attention_backend == "unfused" or self.state.transformer_impl == "local"

    def _check_own_layers(self) -> None:
        """Refuses what memlab does not predict of Megatron's own layers, and sizes without its kernel of softmax."""
        if self.state.transformer_impl != "local":
            return
        model = self.architecture
        others = (
            ("num_moe_experts", model.num_moe_experts, model.routes),
            ("multi_latent_attention", True, model.multi_latent_attention),
            # Torch's own RMSNorm, which Megatron takes there, keeps other tensors.
            ("normalization", model.normalization, model.normalization != "LayerNorm"),
            ("softmax_type", model.softmax_type, model.softmax_type != "vanilla"),
            ("window_size", model.window_size, model.window_size is not None),
            *self.changed_among(*_NOT_BESIDE_OWN_LAYERS),
        )
        advice = "choose transformer_engine, or leave the other out"
        refuse_beside("transformer_impl is 'local' with", "transformer_impl", others, advice)
        matrices = self.micro_batch_size * model.num_attention_heads // self.layout.tensor_model_parallel_size
        if not has_softmax_kernel(self.seq_length, matrices):
            raise RuleError(
                f"seq_length is {self.seq_length} with transformer_impl 'local', must be a multiple of 4 from 20 to "
                f"{LONGEST_OF_SOFTMAX_KERNEL}, with a multiple of 4 matrices of scores, not {matrices}, since the "
                "kernel of Megatron's softmax takes no others, and memlab has no other: choose such a length, or "
                "transformer_engine",
                *("seq_length", "transformer_impl"),
            )

    def _check_attention(self) -> None:
        self._check_own_layers()
        if self.architecture.multi_latent_attention:
            self._check_latent_attention()
        backend, ranks = self.state.attention_backend, self.layout.context_parallel_size
        self._check_windows_and_sinks()
        if ranks > 1 and backend == "unfused":
            raise RuleError(
                f"attention_backend is 'unfused' with context_parallel_size {ranks}, which Transformer Engine refuses: "
                "choose auto, fused or flash, or context_parallel_size 1",
                *("attention_backend", "context_parallel_size"),
            )
        if ranks > 1 and self.state.cp_comm_type == "a2a" and self.engine == "megatron":
            self._check_exchange_of_heads()
        if self.dtype == "fp32" and backend in ("flash", "fused"):
            raise RuleError(
                f"attention_backend is {backend!r} with dtype fp32, must be auto or unfused there, since Transformer "
                "Engine's fused kernels take 16 bits: choose one of them, or dtype bf16",
                *("attention_backend", "dtype"),
            )
        if self.engine == "fsdp2":
            self.check_attention_on_fsdp2()

    def _check_exchange_of_heads(self) -> None:
        """Checks the rules of ``AttnFuncWithCPAndQKVOA2A`` (TE 2.16.1), and refuses what memlab does not predict."""
        model, layout = self.architecture, self.layout
        ranks = layout.context_parallel_size
        groups = max(1, model.num_query_groups // layout.tensor_model_parallel_size)  # more ranks share a head of keys
        others = self.changed_among("packed_sequences", "dtype")
        refuse_beside("cp_comm_type is 'a2a' with", "cp_comm_type", others, "choose p2p, or context_parallel_size 1")
        if groups % ranks:
            raise RuleError(
                f"context_parallel_size is {ranks} with cp_comm_type 'a2a', must divide the {groups} heads of keys of "
                f"a rank of {model.name} (Transformer Engine): choose a divisor, or p2p",
                *("context_parallel_size", "cp_comm_type"),
            )

    def _check_windows_and_sinks(self) -> None:
        """Refuses what Transformer Engine has no kernel for, and what memlab does not predict.

        After ``get_attention_backend`` in ``attention/dot_product_attention/utils.py`` of TE 2.16.1.
        """
        model, backend, ranks = self.architecture, self.state.attention_backend, self.layout.context_parallel_size
        has_sinks = model.softmax_type != "vanilla"
        if not has_sinks and model.window_size is None:
            return
        what = f"softmax_type {model.softmax_type!r}" if has_sinks else f"window_size {model.window_size}"
        if ranks > 1 and self.state.cp_comm_type == "p2p":
            raise RuleError(
                f"context_parallel_size is {ranks} with cp_comm_type 'p2p' for {model.name}, which has {what}, for "
                "which Transformer Engine passes no keys and values around: choose cp_comm_type a2a, or "
                "context_parallel_size 1",
                *("context_parallel_size", "cp_comm_type"),
            )
        if backend in ("flash", "unfused"):
            reason = "memlab does not predict it with this backend"
            if has_sinks and backend == "flash":
                reason = "Transformer Engine has no such kernel of flash-attn"
            raise RuleError(
                f"attention_backend is {backend!r}, must be auto or fused for {model.name}, which has {what}, since "
                f"{reason}: choose one of them",
                "attention_backend",
            )

    def _check_latent_attention(self) -> None:
        model = self.architecture
        is_padded = self.packed_sequences is not None and self.state.pad_packed_values
        if self.state.attention_backend == "flash" and not (model.has_kernel_of_flash_attn_2 or is_padded):
            raise RuleError(
                f"attention_backend is 'flash', must be another one for {model.name}, whose heads of keys have "
                f"{model.qk_head_dim + model.qk_pos_emb_head_dim} channels and those of values {model.v_head_dim}: "
                "Transformer Engine before 2.17 refuses flash-attn 2 there, unless packed rows are padded, and memlab "
                "predicts neither the padding of 2.17 nor flash-attn 3: choose auto or fused, or pack rows with "
                "pad_packed_values",
                *("attention_backend", "pad_packed_values"),
            )
        if self.state.apply_rope_fusion and model.rope_type != "yarn":
            raise RuleError(
                f"apply_rope_fusion is True, must be False for the multi-latent attention of {model.name}, by a "
                f"rule of Megatron-Core: rope_type is {model.rope_type!r}, must be yarn there: leave it out",
                "apply_rope_fusion",
            )

    def _check_adapters(self) -> None:
        lora, layout = self.state.lora, self.layout
        if lora is None:
            return
        if self.engine == "fsdp2":
            self.check_adapters_on_fsdp2(lora)
            return
        others = [name for name in lora.target_modules if not name.endswith(OF_LATENT_ATTENTION)]
        of_transformers = [
            name for name in others if name.endswith(NAMES_OF_TRANSFORMERS) and not name.endswith(LINEARS)
        ]
        if of_transformers:
            raise RuleError(
                f"lora_target_modules has {', '.join(of_transformers)}, which engine {self.engine!r} does not have: "
                f"name {', '.join(LINEARS)}, or choose engine 'fsdp2'",
                *("lora_target_modules", "engine"),
            )
        if self.architecture.add_bias_linear and lora.library != "megatron_bridge":
            raise RuleError(
                f"lora_library is {lora.library!r}, and the linears of {self.architecture.name} have biases, beside "
                "which memlab predicts Megatron-Bridge's adapters only: leave lora_library out",
                *("lora_library", "lora_rank"),
            )
        if not any(self.weights_of_adapters()):
            raise RuleError(
                f"lora_target_modules is {shortened(list(lora.target_modules))}, which names no linear of "
                f"{self.architecture.name} on rank {layout.rank}, where Megatron-Core then has nothing to train: name "
                "linears of each pipeline stage",
                "lora_target_modules",
            )
        if lora.adapts(OUTPUT_LAYER):
            self.check_output_layer_with_adapter(lora)
        self._check_linears_with_adapters(lora)
        if lora.library == "mcore_bridge" and layout.expert_tensor_size > 1 and self.architecture.routes:
            raise RuleError(
                f"lora_library is 'mcore_bridge' with expert_tensor_parallel_size {layout.expert_tensor_size}, where "
                "mcore-bridge adds no adapters: choose 1, or leave lora_library out",
                *("lora_library", "expert_tensor_parallel_size"),
            )

    def _check_linears_with_adapters(self, lora: LoRA) -> None:
        model, layout, of_bridge = self.architecture, self.layout, lora.library == "megatron_bridge"
        kinds = dict.fromkeys((linear, lora.parts(name)) for linear, name in self.linears_with_adapters())
        for linear, parts in kinds:
            own = linear.name.removesuffix(".weight").rpartition(".")[2]
            if parts and parts != PARTS[own]:
                raise RuleError(
                    f"lora_target_modules has {', '.join(parts)} alone of {own}, must have {', '.join(PARTS[own])}, "
                    "since the step of Megatron-Bridge 0.6.2 fails otherwise: name all of them, or none",
                    "lora_target_modules",
                )
            if linear.num_experts and lora.normalize_moe_lora and lora.rank % model.moe_router_topk:
                raise RuleError(
                    f"lora_rank is {lora.rank} with lora_normalize_moe_lora, must be a multiple of "
                    f"{model.moe_router_topk}, the experts of a token, by a rule of Megatron-Bridge: choose another",
                    *("lora_rank", "lora_normalize_moe_lora"),
                )
            if linear.num_experts and of_bridge and not lora.share_expert_adapters and self.state.fp8_format:
                raise RuleError(
                    f"fp8_format is {self.state.fp8_format!r} with lora_share_expert_adapters False, which memlab does "
                    "not predict together, since Megatron-Bridge's adapters of each expert compute in FP8: leave one "
                    "of the two out",
                    *("fp8_format", "lora_share_expert_adapters"),
                )
            if linear.num_experts and of_bridge and not lora.share_expert_adapters and layout.expert_tensor_size > 1:
                raise RuleError(
                    f"expert_tensor_parallel_size is {layout.expert_tensor_size}, must be 1 with "
                    "lora_share_expert_adapters False, since Megatron-Bridge 0.6.2 gathers what such adapters compute "
                    "without its gradients: choose 1, or let experts share adapters",
                    *("expert_tensor_parallel_size", "lora_share_expert_adapters"),
                )
            name = "expert_tensor_parallel_size" if linear.num_experts else "tensor_model_parallel_size"
            ranks = layout.expert_tensor_size if linear.num_experts else layout.tensor_model_parallel_size
            if of_bridge and linear.split is None and linear.shape[0] % ranks:
                raise RuleError(
                    f"{name} is {ranks}, must divide {linear.shape[0]}, the outputs of {own}, which the ranks share in "
                    "its adapter, by a rule of Megatron-Core: choose another, or name other linears",
                    *(name, "lora_target_modules"),
                )
            if of_bridge and linear.split != 1 and lora.rank_of(linear, model, layout) % ranks:
                raise RuleError(
                    f"lora_rank is {lora.rank}, must be a multiple of {name}, {ranks}, by a rule of Megatron-Core, "
                    "whose ranks share the rows of an adapter: choose another",
                    *("lora_rank", name),
                )

    def _check_packing(self) -> None:
        if self.packed_sequences is None:
            return
        chunks, ranks = self._chunks_of_a_sequence, self.layout.context_parallel_size
        check_whole_number("packed_sequences", self.packed_sequences, at_most=self.seq_length)
        given = f"packed_sequences is {self.packed_sequences}"
        if self.packed_sequences > self.seq_length // chunks:
            raise RuleError(
                f"{given} with context_parallel_size {ranks}, must be at most {self.seq_length // chunks}, so that "
                f"each sequence has {chunks} chunks, two per rank: pack fewer sequences, or make seq_length larger",
                *("packed_sequences", "seq_length"),
            )
        if self.micro_batch_size != 1:
            raise RuleError(
                f"{given}, so micro_batch_size must be 1, not {self.micro_batch_size}, because packed sequences "
                "share one row: make seq_length larger instead, or leave packed_sequences out",
                *("packed_sequences", "micro_batch_size"),
            )
        if self.state.attention_backend == "unfused":
            raise RuleError(
                f"{given} with attention_backend 'unfused', which memlab does not predict for packed sequences: choose "
                "auto, fused or flash",
                *("packed_sequences", "attention_backend"),
            )

    def _check_mask(self) -> None:
        of_loader = "create_attention_mask_in_dataloader"
        for other, is_given in (
            ("packed_sequences", self.packed_sequences is not None),
            ("create_attention_mask", self.state.create_attention_mask),
        ):
            if is_given and self.state.create_attention_mask_in_dataloader:
                raise RuleError(
                    f"{of_loader} is True with {other}, which no framework combines: leave one of the two out",
                    *(of_loader, other),
                )
        if not self.state.create_attention_mask:
            return
        backend = self.state.attention_backend
        others = (
            *self.changed_among("packed_sequences", "context_parallel_size"),
            ("attention_backend", backend, backend == "unfused"),
        )
        refuse_beside("create_attention_mask is True with", "create_attention_mask", others, "leave one of them out")

    def _check_graphs(self) -> None:
        impl, state = self.state.cuda_graph_impl, self.state
        if impl == "none":
            return
        modules = state.cuda_graph_modules or ("attn", "mlp")
        beside: dict[str, Any] = {"num_moe_experts": self.architecture.routes and not state.cuda_graph_modules}
        beside |= {"reference_model": state.reference_model != "none", "lora_rank": state.lora is not None}
        # There torch multiplies in layers, with workspaces of cuBLAS for the stream that is captured: not measured.
        beside |= {"dtype": self.dtype == "fp32", "attention_backend": state.attention_backend == "unfused"}
        beside["transformer_impl"] = state.transformer_impl == "local"
        if impl == "full_iteration":
            # The graph keeps two gradients of a matrix that embedding and output layer share: on an H200 it reserved
            # 5 and 7 % more than predicted (`labs/results/h200_cuda_graphs.jsonl`).
            name = "share_embeddings_and_output_weights"
            beside[name] = getattr(self.architecture, name)
        else:
            beside |= {"fp8_format": state.fp8_format, "mtp_num_layers": state.mtp_num_layers}
            beside |= {"packed_sequences": self.packed_sequences is not None and "attn" in modules}
            if self.architecture.routes:
                # Graphs of their layers were measured with this dispatcher, and repeat the counts that they captured.
                beside["moe_token_dispatcher_type"] = state.moe_token_dispatcher_type != "alltoall"
                beside |= {"moe_expert_capacity_factor": state.moe_expert_capacity_factor is not None}
                beside |= {"moe_shared_expert_overlap": state.moe_shared_expert_overlap}
                beside |= {"routing": self.routing.kind == "random"}
            self._check_modules_of_graphs(modules)
        others = [(name, None, is_there) for name, is_there in beside.items()]
        refuse_beside(f"cuda_graph_impl is {impl!r} with", "cuda_graph_impl", others, "choose 'none', or leave {} out")

    def _check_modules_of_graphs(self, modules: tuple[str, ...]) -> None:
        """Checks Megatron's rules (``TransformerConfig.__post_init__``, 0.16.1)."""
        routes, dense = self.architecture.routes, any(not part.routes for part in self.architecture.feed_forwards)
        for name, is_wrong, rule, advice in (
            ("moe_router", not routes, "must be without it where no layer has experts", "leave it out"),
            ("moe_preprocess", "moe_router" not in modules, "must have 'moe_router' with it", "add 'moe_router'"),
            ("mlp", not dense, "must be without it where all layers have experts", "choose attn, moe_router or both"),
        ):
            if name in modules and is_wrong and self.state.cuda_graph_modules:
                raise RuleError(
                    f"cuda_graph_modules has {name!r}, {rule}, by a rule of Megatron-Core: {advice}",
                    "cuda_graph_modules",
                )

    def _check_experts(self) -> None:
        if self.architecture.num_moe_experts is not None:
            self.routing.check(self.architecture.num_moe_experts, self.architecture.moe_router_topk)
            if self.state.moe_router_force_load_balancing and self.routing.kind in ("skewed", "shares"):
                raise RuleError(
                    f"routing is {self.routing} with moe_router_force_load_balancing, must be balanced, random or "
                    "counts, since the job then routes by random logits: leave one of the two out",
                    *("routing", "moe_router_force_load_balancing"),
                )
        elif self.routing != Routing():
            raise ValueError(f"routing is {self.routing}, and {self.architecture.name} has no experts: leave it out")
        if self.state.moe_shared_expert_overlap:
            self._check_overlap_of_shared_experts()
        if self.expert_buffers and not self.architecture.routes:
            raise RuleError(
                f"expert_buffers is {self.expert_buffers!r}, must be False, or True for an MoE architecture "
                f"({self.architecture.name} has {self.architecture.num_moe_experts or 0} experts): leave it out",
                "expert_buffers",
            )

    def _check_overlap_of_shared_experts(self) -> None:
        """Checks Megatron's rule (``TransformerConfig.__post_init__``, 0.16.1)."""
        if not self.architecture.moe_shared_expert_intermediate_size:
            raise RuleError(
                f"moe_shared_expert_overlap is True, and {self.architecture.name} has no shared experts: leave it out",
                "moe_shared_expert_overlap",
            )
        if self.state.moe_token_dispatcher_type != "alltoall":
            raise RuleError(
                f"moe_shared_expert_overlap is True with moe_token_dispatcher_type "
                f"{self.state.moe_token_dispatcher_type!r}, must have alltoall by a rule of Megatron-Core: choose "
                "alltoall, or leave moe_shared_expert_overlap out",
                *("moe_shared_expert_overlap", "moe_token_dispatcher_type"),
            )
        if self.architecture.moe_latent_size:
            raise RuleError(
                f"moe_shared_expert_overlap is True with moe_latent_size {self.architecture.moe_latent_size}, which "
                "Megatron-Core does not have together: leave moe_shared_expert_overlap out",
                "moe_shared_expert_overlap",
            )
        has_adapters = any(".shared_experts." in name for _, name in self.linears_with_adapters())
        if has_adapters and self.layout.tensor_model_parallel_size > 1:
            raise RuleError(
                f"moe_shared_expert_overlap is True with tensor_model_parallel_size "
                f"{self.layout.tensor_model_parallel_size} and adapters of shared experts, which memlab does not "
                "predict together yet: leave one of the three out",
                *("moe_shared_expert_overlap", "tensor_model_parallel_size", "lora_target_modules"),
            )

    @classmethod
    def of(
        cls,
        architecture: Scenario | Architecture | str | Path,
        *,
        num_layers: int | None = None,
        seq_length: int | None = None,
        routing: Routing | str | None = None,
        **others: Any,
    ) -> Scenario:
        """Makes a scenario from what a user writes: names and paths are looked up, what is left out is filled in.

        Args:
            architecture: An `Architecture`, a known name, or the path of a Hugging Face ``config.json``. Or a scenario,
                which gives what is left out.
            num_layers: None takes all layers of the architecture.
            seq_length: None takes the architecture's default.
            routing: A `Routing`, or what `find_routing` reads, such as ``"skewed:2"``.
            **others: The other fields.

        Raises:
            ValueError: If a name is unknown, a file cannot be read, or a value breaks its rule.
        """
        values: dict[str, Any] = {}
        if not isinstance(architecture, Scenario):
            model = architecture if isinstance(architecture, Architecture) else find_architecture(architecture)
            values = {"architecture": model, "num_layers": model.num_layers, "seq_length": model.default_seq_length}
        found = {"num_layers": num_layers, "seq_length": seq_length}
        values |= {name: value for name, value in found.items() if value is not None} | others
        if routing is not None:
            values["routing"] = find_routing(routing) if isinstance(routing, str) else routing
        if isinstance(architecture, Scenario):
            return replace(architecture, **values) if values else architecture
        return cls(**values)

    def on_rank(self, rank: int) -> Scenario:
        """Returns what another rank of the job runs."""
        return self if rank == self.layout.rank else replace(self, layout=replace(self.layout, rank=rank))

    def on_ranks(self, rank: int | None) -> list[Scenario]:
        """Returns what a rank runs, or for None one rank of each kind."""
        return [self.on_rank(number) for number in (self.ranks_of_every_kind if rank is None else (rank,))]

    @property
    def workload(self) -> dict[str, Any]:
        """What may change on a live model: the fields that `Lab.set_workload` takes."""
        return {name: getattr(self, name) for name in WORKLOAD}

    @property
    def in_default_state(self) -> Scenario:
        """The same job in the default training state, but for what its layout needs.

        A pipeline layout places layers of multi-token prediction, and they belong to what a rank builds. With FSDP2,
        experts that ranks share are those of other classes than the default, and ranks that exchange heads share rows
        that others may not.
        """
        needed = ["mtp_num_layers"]
        if self.engine == "fsdp2" and self.layout.context_parallel_size > 1:
            needed += ["cp_comm_type", "attn_implementation", "loss_of_transformers"]
        if self.engine == "fsdp2" and self.layout.expert_model_parallel_size > 1:
            needed += ["model_classes", "attn_implementation", "moe_token_dispatcher_type"]
            needed += ["moe_flex_dispatcher_backend", "moe_deepep_num_sms"]
        return replace(self, state=TrainingState(**{name: getattr(self.state, name) for name in needed}))

    def differences(self, other: Scenario) -> list[str]:
        """Names the fields in which another scenario differs."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on, over all copies of the model."""
        return self.seq_length * self.micro_batch_size * self.num_microbatches * self.layout.data_parallel_size

    @property
    def sequence_lengths(self) -> tuple[int, ...] | None:
        """Lengths of the sequences that are packed into a row; None if rows are not packed.

        Where ranks share sequences, each length is a multiple of the number of chunks that a sequence is cut into.
        """
        if self.packed_sequences is None:
            return None
        unit = self._chunks_of_a_sequence
        length, longer = divmod(self.seq_length // unit, self.packed_sequences)
        return (length * unit + unit,) * longer + (length * unit,) * (self.packed_sequences - longer)

    @property
    def _chunks_of_a_sequence(self) -> int:
        """Chunks that context parallelism cuts each sequence into, two per rank; 1 without."""
        ranks = self.layout.context_parallel_size
        return 2 * ranks if ranks > 1 else 1

    def with_tokens_of_a_row(self, seq_length: int) -> Scenario:
        """Returns the scenario with rows of another length; packed sequences stay as long as they are."""
        return replace(self, seq_length=seq_length, packed_sequences=self.packed_sequences_in(seq_length))

    def packed_sequences_in(self, seq_length: int) -> int | None:
        """Returns how many packed sequences of unchanged length a row of another length has; None without packing."""
        if self.packed_sequences is None:
            return None
        check_whole_number("seq_length", seq_length, at_most=MOST_TOKENS_OF_A_SEQUENCE)
        sequences = seq_length * self.packed_sequences // self.seq_length
        return max(1, min(sequences, seq_length // self._chunks_of_a_sequence))

    @property
    def layers_of_chunks(self) -> tuple[int, ...]:
        """Layers of each model chunk of the job; a single chunk without pipeline stages."""
        return tuple(map(len, self.chunks))

    @property
    def chunks(self) -> tuple[range, ...]:
        """The layers of each model chunk of the job, stage by stage: their numbers in the whole model, from 0.

        Layers are numbered stage by stage, and then from the first stage on again (``get_transformer_layer_offset``,
        megatron/core/transformer/transformer_layer.py, 0.16.1).
        """
        layout, chunks = self.layout, self.layout.virtual_pipeline_model_parallel_size
        stages = layout.pipeline_model_parallel_size
        sizes = [layout.layers_of_chunks(stage, self.num_layers) for stage in range(stages)]
        in_turn = [sizes[stage][chunk] for chunk in range(chunks) for stage in range(stages)]
        ends = [*accumulate(in_turn)]
        ranges = [range(end - size, end) for size, end in zip(in_turn, ends, strict=True)]
        return tuple(ranges[chunk * stages + stage] for stage in range(stages) for chunk in range(chunks))

    @property
    def chunks_of_rank(self) -> tuple[range, ...]:
        """The layers of each model chunk of the rank's pipeline stage, as `chunks`."""
        stage, chunks = self.layout.pipeline_stage, self.layout.virtual_pipeline_model_parallel_size
        return self.chunks[stage * chunks : (stage + 1) * chunks]

    @property
    def layers_of_rank(self) -> tuple[int, ...]:
        """The layers of all chunks of the rank, as `chunks_of_rank`."""
        return tuple(layer for chunk in self.chunks_of_rank for layer in chunk)

    @property
    def extra_layers_of_rank(self) -> int:
        """Layers of multi-token prediction on the rank: all of them are on the last pipeline stage, or none."""
        layout = self.layout
        is_last = layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
        return (self.state.mtp_num_layers or 0) * is_last

    @property
    def shares_embeddings(self) -> bool:
        """Whether the embedding is the output layer too: not beside a head, for which frameworks untie the two.

        See ``value_model`` in verl/workers/engine/megatron/transformer_impl.py (1dda039b).
        """
        return self.architecture.share_embeddings_and_output_weights and self.state.num_labels is None

    @property
    def outputs_of_a_token(self) -> int:
        """Numbers that the output layer of a rank makes of each token: its part of the vocabulary, or those of a head.

        FSDP2's loss has the whole vocabulary.
        """
        ranks = self.layout.tensor_model_parallel_size if self.engine == "megatron" else 1
        return self.state.num_labels or self.architecture.vocab_size // ranks

    @property
    def weights_of_rank(self) -> dict[Weight, int]:
        """How many of the rank's layers have each of their parameters, those of multi-token prediction too."""
        model, extra = self.architecture, self.extra_layers_of_rank
        counts = Counter(model.weights_of(self.layers_of_rank))
        joining = joining_weights(model.hidden_size, model.normalization)
        for weight in (*joining, *model.weights_of([self.num_layers - 1])) if extra else ():
            counts[weight] += extra
        if self.state.fake_balanced_gate:
            counts = Counter({one: count for one, count in counts.items() if not one.name.startswith("mlp.router.")})
        return counts

    def weights_of_adapters(self) -> Iterator[Weight]:
        """Yields the weights of all adapters of the rank."""
        for linear, name in self.linears_with_adapters():
            yield from self.state.lora.weights(linear, name, self.architecture, self.layout)  # type: ignore[union-attr]

    def linears_with_adapters(self) -> Iterator[tuple[Weight, str]]:
        """Yields the linears of the rank that have adapters, each with its name."""
        lora = self.state.lora
        if lora is None:
            return
        for chunk in self.chunks_of_rank:
            for number, layer in enumerate(chunk):
                for part in self.architecture.parts_of(layer):
                    yield from lora.adapted(number, part.weights())
        joining = joining_weights(self.architecture.hidden_size, self.architecture.normalization)
        for number in range(self.extra_layers_of_rank):
            yield from lora.adapted(number, joining, EXTRA_LAYERS)
            for part in self.architecture.parts_of(self.num_layers - 1):
                yield from lora.adapted(number, part.weights(), EXTRA_LAYER)
        if lora.adapts(OUTPUT_LAYER) and self._has_output_layer:
            yield self.architecture.output_weight, OUTPUT_LAYER

    @property
    def _has_output_layer(self) -> bool:
        return self.layout.pipeline_stage == self.layout.pipeline_model_parallel_size - 1

    @property
    def num_layers_of_stage(self) -> int:
        """Layers of the rank's pipeline stage."""
        return self.layout.layers_of_stage(self.layout.pipeline_stage, self.num_layers)

    @property
    def num_layers_of_chunk(self) -> int:
        """Layers of each model chunk of the rank's stage; of the largest where they differ."""
        return max(map(len, self.chunks_of_rank))

    @property
    def most_passes_in_flight(self) -> int:
        """Maximum number of chunk forward passes in flight at once (`Layout.most_passes_in_flight`)."""
        return self.layout.most_passes_in_flight(self.num_microbatches)

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of one micro-batch that the rank holds outside its matrix products, where ranks share sequences."""
        return self.seq_length * self.micro_batch_size // self.layout.ranks_of_a_sequence

    @property
    def ranks_of_every_kind(self) -> tuple[int, ...]:
        """One rank of each kind that layout and routing make. Under random routing every rank is a kind of its own."""
        if self.routing.kind == "random":
            return tuple(range(self.layout.world_size))
        return self.layout.distinct_ranks(by_expert=self.routing != Routing())

    @property
    def num_warm_up_steps(self) -> int:
        """Steps before the one that is like all later ones; before a CUDA graph is captured, eager ones come first."""
        return 1 if self.state.cuda_graph_impl == "none" else 2

    @property
    def rows_vary(self) -> bool:
        """Whether the rows that a rank's experts get differ by layer and micro-batch on the simulated backend."""
        if self.routing.kind == "random":
            return self.layout.expert_model_parallel_size > 1
        return len(self.routing.counts) > 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the scenario as JSON-ready values; a field that is a dataclass becomes a nested object."""
        values = asdict(self)
        counts = [list(layer) for layer in self.routing.counts]
        return values | {"routing": values["routing"] | {"shares": list(self.routing.shares), "counts": counts}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scenario:
        """Builds a scenario from what `to_dict` returned.

        Raises:
            ValueError: If a field is missing, unknown, not of its type, or breaks a rule.
        """
        if isinstance(values, dict) and "versions" not in values:
            values = values | {"versions": OLDER_FILES}
        return build(cls, values, "scenario")

    def __str__(self) -> str:
        batches = f" x {self.num_microbatches}" if self.num_microbatches > 1 else ""
        ranks = f", {self.layout}" if self.layout.world_size > 1 else ""
        rank = f" rank {self.layout.rank}" if self.layout.rank else ""
        routing = f", routing {self.routing}" if self.routing != Routing() else ""
        state = f", {self.state}" if self.state != TrainingState() else ""
        allocator = f", {self.allocator}" if self.allocator != AllocatorSettings() else ""
        buffers = " with expert buffers" if self.expert_buffers else ""
        engine = f", {self.engine}" if self.engine != "megatron" else ""
        packed = f" in {self.packed_sequences} packed sequences" if self.packed_sequences is not None else ""
        return (
            f"{self.architecture.name}, {self.num_layers} layers{buffers}, "
            f"{self.micro_batch_size}{batches} x {self.seq_length} tokens{packed}, {self.dtype}{engine}{ranks}{rank}"
            f"{routing}{state}{allocator}"
        )


def has_softmax_kernel(tokens: int, matrices: int) -> bool:
    """Whether Megatron's own attention computes its softmax by one kernel.

    After ``is_kernel_available`` of ``megatron/core/fusions/fused_softmax.py``, 0.16.1.

    Args:
        tokens: Of a sequence.
        matrices: Of scores, one for each sequence and head of the rank.
    """
    return 16 < tokens <= LONGEST_OF_SOFTMAX_KERNEL and tokens % 4 == 0 and matrices % 4 == 0


def routed_by_chance(scenario: Scenario) -> Scenario:
    """Returns the scenario of a measured step with experts that are drawn at random, unless it has a routing.

    It decides which rank gets how many rows, and how many rows FP8 pads. A router that has just been initialized is
    less even: of 4096 tokens of Qwen3-30B-A3B, its fullest expert got 905 in the first layer, and 3802 in the second.
    """
    if not scenario.architecture.routes or scenario.routing != Routing():
        return scenario
    return replace(scenario, routing=Routing(kind="random", seed=scenario.seed))
