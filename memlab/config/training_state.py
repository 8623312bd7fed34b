"""Which tensors training keeps and computes with: precisions, the optimizer, the loss, attention and FP8.

Names and defaults are Megatron's (``megatron/training/arguments.py``, ``optimizer_config.py``,
``distributed_data_parallel_config.py`` and ``transformer_config.py``, 0.16.1). A change needs other tensors, so it
rebuilds the optimizer or the model. What changes in place between two steps is in `MemorySettings`. A combination that
Megatron refuses is refused here, in one line, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from memlab.config.from_json import build
from memlab.config.lora import OUTPUT_LAYER, LoRA
from memlab.config.option import Option, Rebuilt, check_options, checked_modules, option, options_of
from memlab.config.validation import RuleError, refuse_beside, shortened
from memlab.config.vision import VisionTowerName

MainGradsDtype = Literal["fp32", "bf16"]
MainParamsDtype = Literal["fp32", "fp16"]
MomentDtype = Literal["fp32", "fp16", "bf16", "fp8"]
Loss = Literal[
    "cross_entropy", "logprobs", "logprobs_one_hot", "logprobs_by_sequence", "vocab_parallel_cross_entropy", "softmax",
    "scaled_softmax", "log_softmax", "topk_logits", "logits_kl", "jsd",
]  # fmt: skip
CrossEntropyFusionImpl = Literal["native", "te"]
CudaGraphImpl = Literal["none", "full_iteration", "transformer_engine"]
AttentionBackend = Literal["auto", "fused", "flash", "unfused"]
TransformerImplementation = Literal["transformer_engine", "local"]
ContextParallelExchange = Literal["p2p", "a2a"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
RouterDtype = Literal["params_dtype", "fp32", "fp64"]
TokenDispatcher = Literal["alltoall", "allgather", "flex"]
FlexBackend = Literal["deepep", "hybridep"]
TokenDropPolicy = Literal["probs", "position"]
ReshardAfterForward = Literal["all_but_last", "all", "none"]
AttnImplementation = Literal["sdpa", "flash_attention_2", "eager", "te"]
SeparateEmbeddings = Literal["none", "input", "both"]
ModelClasses = Literal["transformers", "automodel", "automodel_0.7.0"]
LinearImplementation = Literal["torch", "te"]
LossOfTransformers = Literal[
    "cross_entropy", "masked_cross_entropy", "logprobs_flash_attn", "logprobs_by_row", "topk_logits"
]
AdamImplementation = Literal["foreach", "fused", "for_loop", "te_fused"]
ReferenceModel = Literal["none", "copy", "without_adapters"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]

HAVE_ENTROPY = ("logprobs", "vocab_parallel_cross_entropy", "softmax", "scaled_softmax")
"""Losses that read `entropy_loss`."""
READ_CHUNK_SIZE = ("logprobs", "logprobs_one_hot", "logprobs_by_sequence", "softmax", "scaled_softmax", "topk_logits")
"""Losses that read `logprobs_chunk_size`; of `topk_logits`, the teacher's pass does, and not the student's step."""
RING_EXCHANGES = ("proj_fprop", "fc2_fprop")
"""Outputs of row-parallel linears, by Transformer Engine's names of their user buffers."""
LARGEST_OF_TRANSFORMERS = 64
"""Logits of each token that `loss_of_transformers` topk_logits compares, as in NeMo-RL's example."""
COMPARE_WITH_TEACHER = ("logits_kl", "jsd")
"""Losses that compare the logits with those of the frozen model that `reference_model` names."""
_OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_ON_CPU = {"group": "CPU optimizer", "needs": "optimizer_cpu_offload", "rebuilds": "optimizer", "megatron": "optimizer"}
_OPTIMIZER = {"group": "Optimizer", "rebuilds": "optimizer", "megatron": "optimizer"}
_GRADIENTS = {"group": "Gradients", "rebuilds": "model"}
_LOSS = {"group": "Loss", "rebuilds": "nothing"}
_LOSS_OF_FEW = _LOSS | {"group": ""}  # two panels with all controls would not fit into the kernel's queue of messages
_FORWARD = {"group": "Attention and pipeline", "rebuilds": "nothing", "megatron": "model"}
_MODEL = {"group": "", "rebuilds": "model"}
_BUILT: dict[str, Any] = _MODEL | {"megatron": "model"}
_DROP: dict[str, Any] = _BUILT | {"at_most": 0.99, "advice": "give a share from 0 to 0.99"}
_ROUTER = {"group": "Router of experts"}
_ROUTER_FORWARD = {"group": "", "rebuilds": "nothing", "megatron": "model"}
_EXCHANGE: dict[str, Any] = _BUILT | {"engines": ("megatron", "fsdp2")}
_USER_BUFFERS: dict[str, Any] = _BUILT | {"needs": "tp_comm_overlap"}
_FP8 = {"group": "FP8", "rebuilds": "model"}
_OF_TE_ADAM: dict[str, Any] = {"needs": "adam_implementation", "needs_value": "te_fused"}
_FSDP2: dict[str, Any] = {"group": "FSDP2", "engines": ("fsdp2",)}
_MODEL_OF_FSDP2, _STEP_OF_FSDP2 = _FSDP2 | {"rebuilds": "model"}, _FSDP2 | {"rebuilds": "nothing"}
_IMAGES: dict[str, Any] = _MODEL_OF_FSDP2 | {"group": "Images"}
_HIDDEN_MODEL_OF_FSDP2, _HIDDEN_STEP_OF_FSDP2 = _MODEL_OF_FSDP2 | {"group": ""}, _STEP_OF_FSDP2 | {"group": ""}
"""Without a control in the panel, for the reason of `_LOSS_OF_FEW`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Precision and place of gradients and optimizer state, and how loss, attention and matrices are computed.

    The default is plain Megatron in bf16: fp32 gradients, the distributed optimizer with fp32 main parameters and
    moments, an unfused loss, cuDNN's attention, no FP8.

    What a change rebuilds is the smallest part that reads the option: Megatron reads some in each step, some when it
    builds the optimizer, and the others when it builds layers and DDP's buffers. Read in megatron-core 0.16.1 and
    0.19.2; ``tests/unit/test_state_change.py`` compares the bytes of changed labs with those of fresh ones.

    Raises:
        ValueError: If a rule is broken. The message is one line with the value, the rule and what to do.
    """

    # DDP allocates, divides and reduces its buffers by these, and puts its hooks on the model
    # (distributed/distributed_data_parallel.py, distributed/param_and_grad_buffer.py).
    use_distributed_optimizer: bool = option(
        True, "split the optimizer state over the data-parallel ranks", **_GRADIENTS, megatron="ddp optimizer"
    )
    grad_reduce_in_bf16: bool = option(
        False,
        "accumulate and reduce gradients in bf16 (default: fp32)",
        **_GRADIENTS,
        megatron="ddp.grad_reduce_in_fp32",
        engines=("megatron", "fsdp2"),
    )
    """Without the precision-aware optimizer Megatron copies them to fp32 for the update, and sets the copies to None
    only when the next step zeroes its gradients. So `StepRecord.static_bytes`, the bytes when a step begins, include 4
    bytes of copies per parameter; between the zeroing and the next update the copies are not allocated."""
    overlap_grad_reduce: bool = option(
        False, "reduce the gradients of a bucket while backward computes the next one", **_GRADIENTS, megatron="ddp"
    )
    overlap_param_gather: bool = option(
        False,
        "gather the parameters of a bucket while forward computes with those of the previous one",
        **_GRADIENTS,
        megatron="ddp optimizer",
    )
    """Without `overlap_grad_reduce`, each buffer is a single bucket, which is gathered when forward begins.
    (Megatron-Core's DDP allows this; the arguments of Megatron-LM's own scripts do not.)"""
    overlap_param_gather_with_optimizer_step: bool = option(
        False,
        "gather the parameters of the first model chunk while the optimizer updates the others; no buffer has buckets",
        **_MODEL,
        needs="overlap_param_gather",
        megatron="optimizer",
    )
    """DDP's buffers then have one bucket each (``get_model`` in megatron/training/training.py), and each chunk's update
    is an optimizer of its own. Of interleaved pipelines; Megatron-Bridge gives it to others too."""
    ddp_bucket_size: int | None = option(
        None,
        "elements in a bucket of gradients; used only with `overlap_grad_reduce` (default: Megatron's rule)",
        **_GRADIENTS,
        shown_for_none=0,
        at_most=2**40,
        megatron="ddp.bucket_size",
    )

    # Linears read it when they are built (extensions/transformer_engine.py, tensor_parallel/layers.py).
    gradient_accumulation_fusion: bool = option(
        False,
        "add each weight's gradient to its buffer in the matrix product that computes it (Megatron-LM's default)",
        **_GRADIENTS,
        megatron="model",
    )
    """Megatron-Core's own default is False; Megatron-LM's arguments and Megatron-Bridge's providers switch it on.
    Transformer Engine then keeps, between steps too, an unused gradient in the weights' type for every shape of
    weight."""

    # Only the optimizer reads these, when it is built (optimizer/__init__.py, optimizer/distrib_optimizer.py,
    # optimizer/cpu_offloading/hybrid_optimizer.py).
    use_precision_aware_optimizer: bool = option(
        False,
        "let Transformer Engine's Adam hold the main parameters; `main_params_dtype`, `main_grads_dtype`, "
        "`exp_avg_dtype` and `exp_avg_sq_dtype` need this option",
        **_OPTIMIZER,
    )
    main_grads_dtype: MainGradsDtype = option(
        "fp32",
        "type of the gradients that the optimizer reads (default fp32); Megatron-Core ignores it, so no bytes "
        "change: the actual type is fp32, or, with `use_precision_aware_optimizer`, the type in which gradients "
        "are reduced",
        **_OPTIMIZER,
    )
    # Each step writes the main parameters into the parameters, and in fp16 they lose bits: a model that is built again
    # has the weights of the seed.
    main_params_dtype: MainParamsDtype = option(
        "fp32", "type of the main parameters (default fp32)", group="Optimizer", rebuilds="model", megatron="optimizer"
    )
    """With ``fp32``, only the 16 bits that the bf16 parameters lack are stored. With an `fp8_recipe` other than
    ``delayed``, Megatron itself keeps the fp32 main parameters, with all 32 bits."""
    exp_avg_dtype: MomentDtype = option("fp32", "type of Adam's first moment (default fp32)", **_OPTIMIZER)
    """A moment of another type than fp32 is copied to fp32 during the update, as a whole. ``fp8`` takes 2 bytes per
    parameter, as ``bf16`` does: Transformer Engine stores FP8 twice, once transposed."""
    exp_avg_sq_dtype: MomentDtype = option("fp32", "type of Adam's second moment (default fp32)", **_OPTIMIZER)
    # For it a simulated model has as many parameters as a real one (memlab/engines/megatron/layers/fake_layers.py).
    optimizer_cpu_offload: bool = option(
        False,
        "keep main parameters and moments on the host, and update them on the CPU",
        group="CPU optimizer",
        rebuilds="model",
        megatron="optimizer",
    )
    """Megatron's ``HybridDeviceOptimizer``."""
    optimizer_offload_fraction: float = option(
        1.0,
        "share of the parameters whose state is on the host, 0 to 1 (default 1)",
        **_ON_CPU,
        at_most=1,
        advice="give a share from 0 to 1",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = option(False, "transfer some tensors while the CPU updates others", **_ON_CPU)
    pin_cpu_grads: bool = option(True, "page-lock the gradients on the host", **_ON_CPU)
    pin_cpu_params: bool = option(True, "page-lock the parameters on the host", **_ON_CPU)
    manual_gc: bool = option(
        False,
        "collect Python's garbage before the first step; this frees memory only with `optimizer_cpu_offload`",
        group="CPU optimizer",
        rebuilds="optimizer",
    )
    """An argument of Megatron-LM. Without it, the fp32 copies that Megatron makes for its CPU optimizer and then
    discards stay allocated (`memlab.engines.megatron.cpu_optimizer`)."""

    # Each forward reads these from the config (models/common/language_module/language_module.py,
    # models/common/embeddings/rope_utils.py, transformer/mlp.py, transformer/moe/experts.py), or from the scenario
    # (memlab/engines/megatron/training_step.py).
    loss: Loss = option(
        "cross_entropy",
        "cross_entropy: language-model loss, which the model computes (default); the others are computed from the "
        "logits: those of SkyRL (logprobs), NeMo-RL (logprobs_by_sequence or logprobs_one_hot; topk_logits for its "
        "distillation), verl (vocab_parallel_cross_entropy), slime (softmax or scaled_softmax) and ms-swift "
        "(log_softmax), and, with a `reference_model` as the teacher, those of Model Optimizer's distillation "
        "(logits_kl) and ms-swift's GKD (jsd)",
        **_LOSS,
    )
    """What each has in memory says `memlab.engines.megatron.losses.LOSSES`."""
    fp32_output: bool = option(
        False, "with a `loss` other than cross_entropy: copy the logits to fp32 when the model returns them", **_LOSS
    )
    """As Megatron's ``Float16Module`` does by default; only in bf16."""
    cross_entropy_loss_fusion: bool = option(
        False, "compute the cross entropy with fewer kernels", **_LOSS, megatron="model"
    )
    cross_entropy_fusion_impl: CrossEntropyFusionImpl = option(
        "native",
        "fused cross entropy of Megatron (native) or of Transformer Engine (te) (default native)",
        **_LOSS,
        needs="cross_entropy_loss_fusion",
        megatron="model",
    )
    """Transformer Engine's kernel overwrites the logits. megatron-core 0.19 warns of it, and its
    ``megatron/training/arguments.py`` refuses it."""
    logprobs_chunk_size: int | None = option(
        None,
        "with the losses logprobs, logprobs_one_hot, logprobs_by_sequence, softmax and scaled_softmax: tokens "
        "whose log-probabilities are computed at once (default: all); with topk_logits and --forward-only: tokens "
        "whose largest logits are found at once",
        **_LOSS,
        shown_for_none=0,
        at_most=2**26,
    )

    topk_logits_k: int = option(
        64,
        "logits of each token that a teacher sends, and that the loss compares with; with --forward-only, a pass of "
        "the teacher finds them (default 64)",
        **_LOSS_OF_FEW,
        needs="loss",
        needs_value="topk_logits",
        at_most=2**16,
    )
    """``distillation.topk_logits_k`` of NeMo-RL (7ea279ab), whose example has 64."""
    gkd_logits_topk: int | None = option(
        None,
        "largest logits of the teacher that the loss compares with; with `reference_model` none, a server sends them "
        "(default: all)",
        **_LOSS_OF_FEW,
        needs="loss",
        needs_value="jsd",
        at_most=2**16,
    )
    """ms-swift's option of GKD (3602360)."""
    logit_kl_topk: int | None = option(
        None,
        "largest logits of the teacher that the loss compares with (default: all)",
        **_LOSS_OF_FEW,
        needs="loss",
        needs_value="logits_kl",
        at_most=2**16,
    )
    """Model Optimizer's option of its distillation (a2fbac7b)."""
    lm_loss_beside: bool = option(
        False,
        "with the losses logits_kl and jsd: compute the cross entropy too, and add it",
        **_LOSS_OF_FEW,
    )
    """Model Optimizer's ``skip_lm_loss`` off, or ms-swift's ``sft_alpha``. Fused or not it keeps as much, and its own
    temporaries are not at a peak."""
    entropy_loss: bool = option(
        False,
        "with the losses logprobs, vocab_parallel_cross_entropy, softmax and scaled_softmax: subtract a part of the "
        "logits' entropy from the loss, and keep what its gradient needs",
        **_LOSS_OF_FEW,
    )
    entropy_chunk_size: int | None = option(
        None,
        "tokens whose entropy is computed at once (default: all)",
        **_LOSS_OF_FEW,
        needs="loss",
        needs_value="vocab_parallel_cross_entropy",
        at_most=2**26,
    )
    """verl's ``entropy_from_logits_chunk_size``. Where training subtracts the entropy, one chunk has to have all tokens
    of a row, since backward fails otherwise."""
    # The model is built with it.
    num_labels: int | None = option(
        None,
        "outputs of a head in place of the output layer, as of a critic or a reward model; the loss is then the "
        "squared error of its outputs (default: no such head)",
        **_MODEL,
        shown_for_none=0,
        at_most=2**16,
    )
    """Each tensor parallel rank has the whole head, which computes in ``dtype`` and returns fp32. The embedding is not
    tied to it."""

    # A copy is built with the model; each micro-batch runs it (memlab/engines/megatron/training_step.py).
    reference_model: ReferenceModel = option(
        "none",
        "frozen model that computes the loss of each micro-batch first, without gradients, as DPO compares with it, or "
        "the logits of a teacher: a second model of all weights (copy), or the model without its adapters "
        "(without_adapters) (default none)",
        **_MODEL,
    )
    """A copy is on the device wherever the parameters are. It has no part in steps of forward passes alone."""
    teacher_model: str | None = option(
        None,
        "architecture of that frozen model, with all its layers, where it is another one than the trained model's: a "
        "name, or the path of a config.json (default: the trained model's)",
        **_MODEL,
        needs="reference_model",
        needs_value="copy",
    )

    # Transformer Engine reads it at each forward from the environment, where a language model writes it when it is
    # built (memlab/engines/megatron/attention_environment.py).
    attention_backend: AttentionBackend = option(
        "auto", "which attention Transformer Engine uses (default auto)", **_FORWARD
    )
    # `TorchDotProductAttention` reads it.
    pad_packed_values: bool = option(
        False,
        "in packed rows, pad the values of latent attention to the size of keys, as Megatron-Core does since 0.18",
        **_MODEL,
    )
    """mcore-bridge and verl do it with older releases too. Flash-attn 2 takes such rows. An installed Megatron-Core
    of 0.18 or later pads in any case."""
    transformer_impl: TransformerImplementation = option(
        "transformer_engine",
        "whose layers a model has: Transformer Engine's, or Megatron's own (local; default transformer_engine)",
        **_MODEL,
    )
    """Megatron's further value, ``inference_optimized``, trains nothing."""
    # Transformer Engine's attention is built with it (extensions/transformer_engine.py).
    cp_comm_type: ContextParallelExchange = option(
        "p2p",
        "what ranks that share a sequence exchange: keys and values, which go around (p2p), or heads, so that each "
        "rank attends over the whole sequence with its share of them (a2a; with engine fsdp2 as Ulysses in verl)",
        **_BUILT,
        engines=("megatron", "fsdp2"),
    )
    """Megatron's further types, ``all_gather`` and ``a2a+p2p``, are not modelled."""
    # Linears read these when they are built (extensions/transformer_engine.py).
    tp_comm_overlap: bool = option(
        False,
        "compute matrix products while tensor parallel ranks exchange their inputs and outputs, in user buffers of "
        "Transformer Engine outside torch's allocator",
        **_BUILT,
    )
    """`memlab.config.user_buffers` has the buffers. Only sequence parallelism exchanges what they hold."""
    tp_comm_overlap_ag: bool = option(
        True, "gather inputs of forward, and gradients of outputs, in user buffers", **_USER_BUFFERS
    )
    tp_comm_overlap_rs: bool = option(True, "sum outputs of forward through user buffers", **_USER_BUFFERS)
    tp_comm_overlap_rs_dgrad: bool = option(
        False,
        "sum gradients of inputs through user buffers while their own product is computed; `tp_comm_bulk_dgrad` and "
        "`tp_comm_bulk_wgrad` then have no effect",
        **_USER_BUFFERS,
    )
    tp_comm_bulk_dgrad: bool = option(
        True, "gather inputs for weight gradients in user buffers, beside the input's gradient", **_USER_BUFFERS
    )
    tp_comm_bulk_wgrad: bool = option(
        True, "sum gradients of inputs in user buffers, beside the weight's gradient", **_USER_BUFFERS
    )
    tp_comm_overlap_disable_qkv: bool = option(
        False, "gather the input of queries, keys and values without a user buffer in forward", **_USER_BUFFERS
    )
    tp_comm_overlap_disable_fc1: bool = option(
        False, "gather the input of an MLP without a user buffer in forward", **_USER_BUFFERS
    )
    tp_comm_overlap_ring_exchange: tuple[str, ...] = option(
        (),
        f"outputs that go from rank to rank while they are summed: some of {', '.join(RING_EXCHANGES)} (default: none, "
        "they pass in parts)",
        **(_USER_BUFFERS | {"megatron": ""}),
        choices=RING_EXCHANGES,
    )
    """Those whose ``method`` is ``ring_exchange`` in ``tp_comm_overlap_cfg``. Their user buffers are larger."""
    apply_rope_fusion: bool = option(False, "apply the rotary embedding to queries and keys in one kernel", **_FORWARD)
    bias_activation_fusion: bool = option(True, "compute the activation of MLPs in one kernel", **_FORWARD)
    """Megatron-Core's own default is False: SiLU of the gate, the other half and, of experts, the product are then
    tensors of their own, which are kept for backward."""
    # Each micro-batch makes it (memlab/engines/megatron/training_step.py).
    create_attention_mask: bool = option(
        False,
        "give the model a causal mask of 1 byte for each pair of tokens, as NeMo-RL does with rows that it does not "
        "pack",
        group="",
        rebuilds="nothing",
    )
    """The attention is causal without it. The mask of a micro-batch lives until that of the next has been made, and the
    last one until the step ends. Making it takes 8 bytes for each pair of tokens."""
    create_attention_mask_in_dataloader: bool = option(
        False,
        "give the first and the last pipeline stage a causal mask of each sequence, 1 byte for each pair of tokens, as "
        "Megatron-LM's data loader does unless told otherwise",
        group="",
        rebuilds="nothing",
    )
    """It lives until the forward pass of its micro-batch has ended."""
    # The router reads it in each forward (transformer/moe/router.py).
    moe_router_dtype: RouterDtype = option(
        "fp32",
        "type in which the router of experts computes (default fp32); params_dtype is that of the parameters, "
        "Megatron's default",
        **_FORWARD,
    )
    """Probabilities have this type too, up to the experts. Megatron's config has None for ``params_dtype``."""
    # The token dispatcher reads it when it is built and in each forward (transformer/moe/token_dispatcher.py).
    moe_permute_fusion: bool = option(
        True, "sort tokens by their experts in one kernel", group="", rebuilds="model", megatron="model"
    )
    """Megatron's own default is False: the token of each row and, of all tokens and experts, a mask and the
    probabilities are then kept for backward."""
    # Read when the shared experts are built (transformer/moe/moe_layer.py, transformer/moe/shared_experts.py).
    moe_shared_expert_overlap: bool = option(
        False, "compute shared experts on a stream of their own, while ranks exchange tokens", **_BUILT
    )
    """They then hold their tensors at the same time as the dispatcher."""
    # A layer builds its dispatcher by the first (transformer/moe/moe_layer.py), which reads then whether experts are
    # padded (transformer/moe/token_dispatcher.py). The router drops tokens in each forward (transformer/moe/router.py).
    moe_token_dispatcher_type: TokenDispatcher = option(
        "alltoall",
        "how ranks exchange the tokens of experts: each sends rows to the ranks of their experts (alltoall), all "
        "gather the tokens of all (allgather), or a library sends them (flex, only predicted, as read in its source)",
        **_EXCHANGE,
    )
    """Megatron's own default is ``allgather``."""
    moe_flex_dispatcher_backend: FlexBackend = option(
        "deepep",
        "which library sends tokens: DeepEP (deepep), each token once to a rank, or HybridEP (hybridep), which sorts "
        "rows by experts too; their buffers are outside torch's allocator",
        **_EXCHANGE,
        needs="moe_token_dispatcher_type",
        needs_value="flex",
    )
    moe_deepep_num_sms: int = option(
        20,
        "multiprocessors that exchange tokens; DeepEP's buffers grow with them",
        **_EXCHANGE,
        at_least=2,
        at_most=128,
        needs="moe_flex_dispatcher_backend",
        needs_value="deepep",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "drop the tokens of an expert that are more than this many times its equal share (default: drop none)",
        **_BUILT,
        at_most=2**14,
        advice="give a number above 0, or leave it out",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False, "pad the rows of each expert to its capacity", **_BUILT, needs="moe_expert_capacity_factor"
    )
    """Then no number of rows depends on the routing."""
    moe_token_drop_policy: TokenDropPolicy = option(
        "probs",
        "which tokens are dropped: those of the lowest probabilities (probs), or the last ones (position)",
        **_BUILT,
        needs="moe_expert_capacity_factor",
    )
    # Layers read them when they are built (transformer/transformer_layer.py, extensions/transformer_engine.py,
    # tensor_parallel/layers.py).
    hidden_dropout: float = option(
        0.0,
        "share of elements that dropout sets to 0 in embeddings and before residuals (default 0)",
        **_DROP,
    )
    """Megatron's own default is 0.1. Backward needs a mask of 1 byte per element. Each step of a model drops the same
    elements."""
    attention_dropout: float = option(
        0.0, "share of the attention's probabilities that dropout sets to 0 (default 0)", **_DROP
    )
    """Megatron's own default is 0.1. Fused kernels keep the state of their random numbers; unfused attention keeps a
    mask of 1 byte for each probability, and the probabilities before and after."""
    # The router reads the first when it is built, and the second in each forward (transformer/moe/router.py).
    moe_router_load_balancing_type: LoadBalancing = option(
        "aux_loss",
        "loss by which the router of experts is balanced; none has no such loss (default aux_loss)",
        **_ROUTER,
        rebuilds="model",
        megatron="model",
    )
    """Of a model whose ``moe_aux_loss_coeff`` is 0, no type has one. Megatron's further type, ``sinkhorn``, is not
    modelled."""
    moe_router_fusion: bool = option(
        False, "choose experts and compute the loss that balances them in fewer kernels", **_ROUTER_FORWARD
    )
    """Backward then needs the scores and the map of the chosen experts, each once for the choice, and the scores once
    more for the loss. Transformer Engine's kernels take no fp64."""
    moe_router_force_load_balancing: bool = option(
        False, "route by random logits, as benchmarks do, so that experts get about equal shares", **_ROUTER_FORWARD
    )
    """Each step draws the same ones."""
    moe_z_loss_coeff: float | None = option(
        None,
        "coefficient of a loss that keeps the logits of the router small (default: no such loss)",
        group="",
        rebuilds="nothing",
        megatron="model",
        shown_for_none=0,
        at_most=10**6,
        advice="give a number, or leave it out",
    )
    # The model is built with them, and its forward computes their losses (transformer/multi_token_prediction.py and
    # models/gpt/gpt_model.py).
    mtp_num_layers: int | None = option(
        None,
        "layers of multi-token prediction, each with logits and a loss of its own (default: none)",
        **_BUILT,
        shown_for_none=0,
        at_most=16,
    )
    """They are on the last pipeline stage, which then has embeddings too, and each is a layer like the model's last
    one, behind two norms and a matrix that joins hidden states and the embeddings of the following tokens."""
    mtp_detach_heads: bool = option(
        False,
        "let the losses of multi-token prediction train its own layers alone",
        **_BUILT,
        needs="mtp_num_layers",
        since=(0, 19),
    )
    """No gradient reaches the model's layers, its embeddings and its output layer from them
    (``transformer/multi_token_prediction.py``, 0.19.2)."""
    # NeMo-RL and SkyRL do it before DDP's buffers are made.
    freeze_moe_router: bool = option(
        False, "do not train the weight of the router of experts", group="", rebuilds="model"
    )
    """It then has no gradient and no optimizer state. Its bias, of which the experts' load decides, moves all the
    same."""
    # The schedule reads it from the config in each step (pipeline_parallel/schedules.py).
    deallocate_pipeline_outputs: bool = option(
        False,
        "free what a pipeline stage has sent to the next one, as Megatron-LM and Megatron-Bridge always do",
        **_FORWARD,
    )
    """Its graph for backward stays. Megatron-Core's own default is False."""
    # DDP reads it when it is built, and the schedule in each step (``finalize_model_grads``).
    calculate_per_token_loss: bool = option(
        False,
        "divide gradients by the tokens of the whole batch, instead of each micro-batch's loss by its own",
        **_BUILT,
    )
    """The last pipeline stage sends the number of tokens to the others, so NCCL sets up the group of the stages, also
    of one (`memlab.fitting.outside_torch`)."""
    cuda_graph_impl: CudaGraphImpl = option(
        "none",
        "replay forward and backward of all micro-batches from one CUDA graph, or layers from graphs of "
        "Transformer Engine; nothing else gets the memory of a graph",
        **_BUILT,
    )
    """So megatron-core 0.18 and later call it (``full_cuda_graph.py``); before, ``full_iteration`` is a scope of
    ``local``. Memory is predicted for the step that captures the graphs: the steps before are eager, and those after
    it allocate only outside the graphs."""
    cuda_graph_modules: tuple[str, ...] | None = option(
        None,
        "capture attention, the MLP, or what is before the experts, of each layer (default: whole layers)",
        **_MODEL,
        choices=("attn", "mlp", "moe_router", "moe_preprocess"),
        needs="cuda_graph_impl",
        needs_value="transformer_engine",
    )
    """Before megatron-core 0.18 ``cuda_graph_scope``. ``moe_router`` ends with the routing map, ``moe_preprocess`` with
    the rows that are sent to experts. The experts themselves (``moe``) are not predicted."""

    # What only the engine fsdp2 reads (engines/fsdp2): names and defaults are NeMo Automodel's where it has them
    # (components/distributed/config.py and parallelizer.py, 36044ad3), and torch's.
    fsdp_version: int = option(
        2,
        "torch's fully_shard (2), or its FullyShardedDataParallel (1), which shards the parameters of a layer as one",
        at_most=2,
        advice="choose 1 or 2",
        **_MODEL_OF_FSDP2,
    )
    """verl's strategies ``fsdp2`` and ``fsdp``; the name is that of Hugging Face's accelerate."""
    use_orig_params: bool = option(
        False,
        "with `fsdp_version` 1: give the optimizer each parameter's part of the flat parameter",
        **_MODEL_OF_FSDP2,
    )
    fp32_sharded_params: bool = option(
        False,
        "keep each rank's parameters, their gradients and Adam's moments in fp32; layers compute in `dtype`",
        **_MODEL_OF_FSDP2,
    )
    """``torch_dtype: float32`` in an Automodel recipe; forward and backward gather the parameters in ``dtype``."""
    reshard_after_forward: ReshardAfterForward = option(
        "all_but_last",
        "layers whose gathered parameters are freed after their forward and gathered again for backward (default "
        "all_but_last)",
        **_STEP_OF_FSDP2,
    )
    reshard_after_forward_ranks: int | None = option(
        None,
        "free the gathered parameters of these layers but for the part that one of N ranks keeps, so that only N ranks "
        "gather them for backward (default: all ranks that have shards)",
        shown_for_none=0,
        at_least=2,
        at_most=2**17,
        advice="give a divisor of the number of ranks that have shards",
        **_MODEL_OF_FSDP2,
    )
    """A whole number as the ``reshard_after_forward`` of torch's `fully_shard`."""
    fsdp2_forward_prefetch_depth: int = option(
        0,
        "number of layers after a layer whose parameters are gathered when it begins its forward; with 0, torch "
        "gathers each layer as it begins (default 0)",
        at_least=0,
        at_most=1024,
        **_STEP_OF_FSDP2,
    )
    fsdp2_backward_prefetch_depth: int = option(
        0,
        "number of layers before a layer whose parameters are gathered when it begins its backward; with 0, torch "
        "gathers the one that its forward order names (default 0)",
        at_least=0,
        at_most=1024,
        **_STEP_OF_FSDP2,
    )
    """With Automodel's ``enable_fsdp2_prefetch``, the depths are 1 in forward and 2 in backward."""
    dp_replicate_size: int = option(
        1,
        "number of groups of data-parallel ranks that each have all shards (HSDP); gradients are reduced in each "
        "group, and then over the groups (default 1)",
        at_most=2**17,
        advice="give a divisor of data_parallel_size",
        **_MODEL_OF_FSDP2,
    )
    fsdp_cpu_offload: bool = option(
        False,
        "keep shards, their gradients and Adam's moments on the host, where Adam updates them",
        **_MODEL_OF_FSDP2,
    )
    """torch's ``CPUOffloadPolicy``, as ``distributed.offload_policy`` of Automodel gives it. Whether the memory is
    pinned changes no bytes of the device."""
    defer_fsdp_grad_sync: bool = option(
        False,
        "reduce gradients only in the last micro-batch; until then each rank has those of whole layers",
        **_STEP_OF_FSDP2,
    )
    """Automodel's own default is True. They have the type in which gradients are reduced."""
    schedule_runs: int = option(
        1,
        "with pipeline stages, number of runs of the schedule before an update, which share the step's micro-batches; "
        "each reduces gradients at its end (default 1)",
        advice="give a divisor of num_microbatches",
        **_HIDDEN_STEP_OF_FSDP2,
    )
    """In NeMo Automodel, the rows of all data parallel ranks' ``local_batch_size`` are one run, and
    ``global_batch_size`` counts the rows of an update."""
    return_outputs: bool = option(
        True,
        "keep the logits of all micro-batches on the last pipeline stage until the next run, and join them at its end",
        **_HIDDEN_STEP_OF_FSDP2,
    )
    """An argument of the ``step`` of torch's schedules, whose default NeMo Automodel takes; torchtitan gives False."""
    separate_embeddings: SeparateEmbeddings = option(
        "none",
        "shard the embedding by itself (input), or it and the output layer (both), where they are not tied; by default "
        "(none) they are sharded together with the last norm",
        **_HIDDEN_MODEL_OF_FSDP2,
    )
    """``apply_fsdp2`` of SkyRL (a9564572) has the first, that of verl (0.9.1) and Automodel 0.7.0 have both."""
    reshard_root_after_forward: bool = option(
        False,
        "free the gathered output layer and last norm after forward too, unless `reshard_after_forward` is none",
        **_HIDDEN_STEP_OF_FSDP2,
    )
    """As verl and SkyRL do, which give torch's `fully_shard` an explicit True for the whole model."""
    loss_of_transformers: LossOfTransformers = option(
        "cross_entropy",
        "transformers' own loss (cross_entropy, the default); the same, with the model's output released before "
        "backward (masked_cross_entropy, Automodel 0.7.0); log-probabilities by flash-attn's kernel, or one token "
        "after the other (logprobs_flash_attn, logprobs_by_row, verl and SkyRL); or those of the logits that are the "
        "teacher's largest, which a pass of the teacher finds with --forward-only (topk_logits, NeMo-RL)",
        **_HIDDEN_STEP_OF_FSDP2,
    )
    """`memlab.engines.fsdp2.losses` has them."""
    model_classes: ModelClasses = option(
        "transformers",
        "whose classes the model is built of: those of transformers (the default), or NeMo Automodel's own of Llama, "
        "Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V3, GLM-4.5, GLM-4.7-Flash and gpt-oss, as in August 2026 (automodel) or as "
        "released (automodel_0.7.0, without the last three)",
        **_HIDDEN_MODEL_OF_FSDP2,
    )
    """`memlab.engines.fsdp2.automodel_classes` and `memlab.engines.fsdp2.automodel_experts` have them."""
    fake_balanced_gate: bool = option(
        False,
        "with NeMo Automodel's own classes of models with experts: tokens choose experts in turn, without a router",
        **_HIDDEN_MODEL_OF_FSDP2,
    )
    """``model.backend.fake_balanced_gate``, of Automodel's benchmarks: the model then has no weights of routers."""
    linear_implementation: LinearImplementation = option(
        "torch",
        "with NeMo Automodel's own classes of models with experts: whose linears they have, torch's or Transformer "
        "Engine's (te, only predicted), which have a workspace of their own",
        **_HIDDEN_MODEL_OF_FSDP2,
    )
    vision_tower: VisionTowerName | None = option(
        None,
        "vision tower of transformers' model beside the language model, with its projector: that of Gemma 3 4B, "
        "Qwen2.5-VL 3B or 7B, Qwen3-VL 2B, 4B or 8B, or a tiny one (default: no tower)",
        **_IMAGES,
    )
    """`memlab.config.vision` has them: models of NeMo Automodel's recipes whose classes are transformers'."""
    images_per_sequence: int | None = option(
        None,
        "number of images in each sequence, which the data decides and no default could: give that of the samples with "
        "the most",
        needs="vision_tower",
        shown_for_none=0,
        at_most=2**16,
        **_IMAGES,
    )
    patches_per_image: int | None = option(
        None,
        "number of patches of each image, before several become one token, of towers that take images of any size: "
        "give that of the largest images",
        needs="vision_tower",
        shown_for_none=0,
        at_most=2**24,
        **_IMAGES,
    )
    """Gemma 3 scales each image to 4,096 patches. Windows of Qwen2.5-VL's tower are those of images whose shape is as
    near to a square as their number of patches allows."""
    freeze_vision_tower: bool = option(
        False,
        "train the language model and the projector, and not the tower, whose parameters FSDP2 then shards with those "
        "outside the layers",
        needs="vision_tower",
        **_IMAGES,
    )
    """``freeze_config.freeze_vision_tower`` of NeMo Automodel, where it is the default of that section."""
    attn_implementation: AttnImplementation = option(
        "sdpa",
        "the function of transformers for attention: torch's scaled_dot_product_attention (sdpa, the default), the "
        "package flash-attn 2, products of whole matrices of scores (eager), or, with NeMo Automodel's classes of "
        "models with experts, Transformer Engine's (te, only predicted)",
        **_MODEL_OF_FSDP2,
    )
    adam_implementation: AdamImplementation = option(
        "foreach",
        "how torch.optim.AdamW updates parameters: all at once with temporary tensors of their size (foreach, torch's "
        "default), in one kernel without (fused), or one by one (for_loop); te_fused is Transformer Engine's FusedAdam "
        "with fp32 moments",
        rebuilds="optimizer",
        **_FSDP2,
    )
    master_weights: bool = option(
        False, "keep main parameters of the shards in fp32", rebuilds="optimizer", **_OF_TE_ADAM, **_FSDP2
    )
    store_param_remainders: bool = option(
        False,
        "of the main parameters of bf16 shards, keep only the 16 bits that the shards lack",
        rebuilds="optimizer",
        **_OF_TE_ADAM,
        **_FSDP2,
    )

    # Layers make their FP8 parameters, scales and paddings when they are built (extensions/transformer_engine.py).
    fp8_format: Fp8Format | None = option(
        None, "multiply matrices in this FP8 format (default: multiply them in `dtype`)", **_FP8, megatron="model.fp8"
    )
    """``e4m3`` everywhere, or ``hybrid`` with e5m2 for gradients."""
    fp8_recipe: Fp8Recipe = option(
        "delayed",
        "how FP8 tensors are scaled (default delayed); no prediction for mxfp8 has ever been compared with a "
        "measurement on a GPU",
        **_FP8,
        needs="fp8_format",
        megatron="model",
    )
    """``mxfp8`` needs Blackwell."""
    non_tn_fp8_gemm: bool = option(
        False,
        "keep no transposed copies of FP8 matrices, as on Blackwell, whose products need none; Hopper's do",
        **_MODEL,
        needs="fp8_format",
    )
    """Of the recipes ``delayed`` and ``tensorwise``. The GPU decides it, by ``is_non_tn_fp8_gemm_supported`` of
    Transformer Engine 2.16.1: of compute capability 10 and 11, and from 13.0 on. No prediction with it was compared
    with a GPU."""
    fp8_param_gather: bool = option(
        False, "store the weight matrices in FP8", **_FP8, needs="fp8_format", megatron="model.fp8_param ddp"
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = option(
        False,
        "gather MXFP8 parameters as bf16 in the gradients' buffer, which Megatron needs for them",
        **(_FP8 | {"group": ""}),
        needs="fp8_param_gather",
        megatron="ddp optimizer",
    )
    """The quantized parameters are then outside DDP's buffers. megatron-core 0.16 keeps all other parameters twice with
    it, as they are and in a buffer; 0.19 keeps them once."""

    lora: LoRA | None = None
    """Adapters of low rank, which alone are trained; None trains the model. Its options are ``lora_rank`` and so on."""

    def __post_init__(self) -> None:
        for name in ("cuda_graph_modules", "tp_comm_overlap_ring_exchange"):
            object.__setattr__(self, name, checked_modules(options_of(TrainingState)[name], getattr(self, name)))
        check_options(self)
        self._check_optimizer()
        self._check_loss()
        self._check_fp8()
        self._check_lora()
        if self.moe_router_fusion and self.moe_router_dtype == "fp64":
            raise RuleError(
                "moe_router_fusion is True with moe_router_dtype 'fp64', must have another type by a rule of "
                "Transformer Engine: choose fp32, or leave moe_router_fusion out",
                *("moe_router_fusion", "moe_router_dtype"),
            )
        if self.moe_expert_capacity_factor == 0:
            raise RuleError(
                "moe_expert_capacity_factor is 0, must be above 0, since every token would be dropped: give another "
                "value, or leave it out",
                "moe_expert_capacity_factor",
            )

    def _check_optimizer(self) -> None:
        if not self.use_precision_aware_optimizer:
            for name in _OPTIMIZER_DTYPES:
                if getattr(self, name) != "fp32":
                    raise RuleError(
                        f"{name} is {getattr(self, name)!r}, must be fp32 without the precision-aware optimizer, by a "
                        f"rule of Megatron-Core: set use_precision_aware_optimizer, or leave {name} out",
                        name,
                        "use_precision_aware_optimizer",
                    )
        elif not self.use_distributed_optimizer:
            raise RuleError(
                "use_precision_aware_optimizer is True, but needs the distributed optimizer, by a rule of "
                "Megatron-Core: set use_distributed_optimizer, or leave use_precision_aware_optimizer out",
                *("use_precision_aware_optimizer", "use_distributed_optimizer"),
            )
        if self.optimizer_cpu_offload and not self.use_distributed_optimizer:
            # Float16OptimizerWithFloat16Params replaces the parameters that HybridDeviceOptimizer looks up later.
            raise RuleError(
                "optimizer_cpu_offload is True without the distributed optimizer, where Megatron's CPU optimizer "
                "fails: set use_distributed_optimizer, or leave optimizer_cpu_offload out",
                *("optimizer_cpu_offload", "use_distributed_optimizer"),
            )

    def _check_loss(self) -> None:
        if self.num_labels is not None:
            self._check_head()
        if self.reference_model != "none":
            self._check_reference_model()
        elif self.loss in COMPARE_WITH_TEACHER and not (self.loss == "jsd" and self.gkd_logits_topk is not None):
            raise RuleError(
                f"loss is {self.loss!r}, which compares with a teacher's logits, and reference_model is 'none': choose "
                "'copy', or 'without_adapters' with lora_rank",
                *("loss", "reference_model"),
            )
        for name, losses, joint, what in (
            ("logprobs_chunk_size", READ_CHUNK_SIZE, ", ", "read it"),
            ("entropy_loss", HAVE_ENTROPY, ", ", "read it"),
            ("lm_loss_beside", COMPARE_WITH_TEACHER, " and ", "are computed beside the cross entropy"),
        ):
            if getattr(self, name) != _default(name) and self.loss not in losses:
                raise RuleError(
                    f"{name} is {getattr(self, name)}, but only the losses {joint.join(losses)} {what}, and loss is "
                    f"{self.loss!r}: choose one of them, or leave {name} out",
                    *(name, "loss"),
                )
        if self.fp32_output and self.loss == "cross_entropy":
            raise RuleError(
                "fp32_output is True, but loss 'cross_entropy' does not read it, since the model returns no logits: "
                "choose another loss, or leave fp32_output out",
                *("fp32_output", "loss"),
            )
        if self.mtp_num_layers is not None and self.loss != "cross_entropy":
            # Without labels the model fails (``_postprocess`` in models/gpt/gpt_model.py, 0.16.1).
            raise RuleError(
                f"mtp_num_layers is {self.mtp_num_layers} with loss {self.loss!r}, must have 'cross_entropy', since "
                "Megatron-Core's model itself computes the losses of multi-token prediction: choose it, or leave "
                "mtp_num_layers out",
                *("mtp_num_layers", "loss"),
            )
        if self.cross_entropy_loss_fusion and self.loss != "cross_entropy":
            raise RuleError(
                f"cross_entropy_loss_fusion is True, but only loss 'cross_entropy' reads it, and loss is "
                f"{self.loss!r}: choose loss 'cross_entropy', or leave cross_entropy_loss_fusion out",
                *("cross_entropy_loss_fusion", "loss"),
            )

    def _check_head(self) -> None:
        given = f"num_labels is {self.num_labels}"
        for name, what in (
            ("loss", "the output layer makes logits for it"),
            ("cross_entropy_loss_fusion", "the output layer makes logits for it"),
            ("mtp_num_layers", "its layers compute logits by the output layer"),
        ):
            if getattr(self, name) != _default(name):
                raise RuleError(
                    f"{given} with {name} {getattr(self, name)!r}, and {what}, which the head replaces: leave one of "
                    "the two out",
                    *("num_labels", name),
                )
        if self.lora is not None and self.lora.adapts(OUTPUT_LAYER):
            raise RuleError(
                f"{given} with lora_target_modules that name {OUTPUT_LAYER}, which the head replaces: leave one of the "
                "two out",
                *("num_labels", "lora_target_modules"),
            )

    def _check_reference_model(self) -> None:
        given = f"reference_model is {self.reference_model!r}"
        compares = self.loss in COMPARE_WITH_TEACHER
        wanted = "without_adapters" if self.lora is not None else "copy"
        if self.reference_model != wanted and (self.teacher_model is None or self.reference_model != "copy"):
            raise RuleError(
                f"{given} {'with' if self.lora is not None else 'without'} lora_rank, must be {wanted!r} there, since "
                "frozen weights need no second copy: choose it, or none",
                *("reference_model", "lora_rank"),
            )
        if self.teacher_model is not None and not compares:
            raise RuleError(
                f"teacher_model is {shortened(self.teacher_model)}, but loss is {self.loss!r}, and only "
                f"{' and '.join(COMPARE_WITH_TEACHER)} compare with a teacher: choose one of them, or leave "
                "teacher_model out",
                *("teacher_model", "loss"),
            )
        names = ("num_labels", "mtp_num_layers") if compares else ("loss", "num_labels", "mtp_num_layers")
        others = ((name, getattr(self, name), getattr(self, name) != _default(name)) for name in names)
        refuse_beside(f"{given} with", "reference_model", others, "leave one of the two out")
        if self.fp8_param_gather and self.fp8_recipe == "mxfp8":
            raise RuleError(
                f"{given} with fp8_param_gather and fp8_recipe 'mxfp8', which memlab does not predict together: choose "
                "fp8_recipe 'tensorwise' or 'blockwise', or leave one of the two out",
                *("reference_model", "fp8_param_gather"),
            )

    def _check_fp8(self) -> None:
        if self.fp8_param_gather and self.fp8_format is None:
            raise RuleError(
                "fp8_param_gather is True, but needs an fp8_format: set fp8_format 'e4m3' or 'hybrid', or leave "
                "fp8_param_gather out",
                *("fp8_param_gather", "fp8_format"),
            )
        if self.reuse_grad_buf_for_mxfp8_param_ag != (self.fp8_param_gather and self.fp8_recipe == "mxfp8"):
            # ``replace_raw_data`` of Transformer Engine 2.16.1 moves no MXFP8 tensor into DDP's buffer.
            given = f"fp8_recipe {self.fp8_recipe!r} and fp8_param_gather {self.fp8_param_gather}"
            raise RuleError(
                f"reuse_grad_buf_for_mxfp8_param_ag is {self.reuse_grad_buf_for_mxfp8_param_ag} with {given}, must be "
                "True with 'mxfp8' and True, since Transformer Engine moves no MXFP8 parameter into DDP's buffer, and "
                "False otherwise, where memlab does not have it: change one of the three",
                *("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", "fp8_recipe"),
            )
        if self.reuse_grad_buf_for_mxfp8_param_ag and self.overlap_param_gather_with_optimizer_step:
            raise RuleError(
                "overlap_param_gather_with_optimizer_step is True with reuse_grad_buf_for_mxfp8_param_ag, must be "
                "False there by a rule of Megatron-Core 0.19: leave it out",
                *("overlap_param_gather_with_optimizer_step", "reuse_grad_buf_for_mxfp8_param_ag"),
            )
        if self.non_tn_fp8_gemm and self.fp8_recipe not in ("delayed", "tensorwise"):
            raise RuleError(
                f"non_tn_fp8_gemm is True with fp8_recipe {self.fp8_recipe!r}, must have delayed or tensorwise, whose "
                "transposed copies it leaves out: choose one of them, or leave non_tn_fp8_gemm out",
                *("non_tn_fp8_gemm", "fp8_recipe"),
            )
        if self.fp8_param_gather and not self.use_distributed_optimizer:
            raise RuleError(
                "fp8_param_gather is True without the distributed optimizer, which alone writes FP8 parameters: set "
                "use_distributed_optimizer, or leave fp8_param_gather out",
                *("fp8_param_gather", "use_distributed_optimizer"),
            )
        if self.fp8_param_gather and self.optimizer_cpu_offload and self.fp8_recipe != "delayed":
            raise RuleError(
                f"fp8_recipe is {self.fp8_recipe!r} with fp8_param_gather and optimizer_cpu_offload, which the "
                "arguments of Megatron-LM refuse and memlab does not predict: choose 'delayed', or leave one of the "
                "two options out",
                *("fp8_recipe", "fp8_param_gather", "optimizer_cpu_offload"),
            )
        if self.fp8_param_gather and self.use_precision_aware_optimizer:
            self._check_main_parameters_of_fp8()

    def _check_main_parameters_of_fp8(self) -> None:
        # Under 'delayed', and with fp16 main parameters, Transformer Engine's Adam holds them (optimizer_config.py). Of
        # fp32 ones it stores int16 remainders, which its kernel for FP8 parameters refuses (multi_tensor/adam.cu). Of
        # other recipes' parameters Megatron gives it None (distrib_optimizer.py).
        needed = "fp16" if self.fp8_recipe == "delayed" else "fp32"
        if self.main_params_dtype != needed and not self.optimizer_cpu_offload:
            raise RuleError(
                f"main_params_dtype is {self.main_params_dtype!r} with fp8_param_gather, fp8_recipe "
                f"{self.fp8_recipe!r} and the precision-aware optimizer, must be {needed!r} there, because the "
                "step fails "
                f"otherwise: choose {needed!r}, or leave fp8_param_gather out",
                *("main_params_dtype", "fp8_param_gather", "fp8_recipe"),
            )

    def _check_lora(self) -> None:
        if self.lora is None:
            return
        if not isinstance(self.lora, LoRA):
            raise RuleError(
                f"lora is {shortened(self.lora)}, must be LoRA(...) or None: give LoRA(rank=...)", "lora_rank"
            )
        if self.reuse_grad_buf_for_mxfp8_param_ag:
            raise RuleError(
                f"lora_rank is {self.lora.rank} with fp8_param_gather and fp8_recipe 'mxfp8', which memlab does not "
                "predict together: choose fp8_recipe 'tensorwise' or 'blockwise', or leave fp8_param_gather out",
                *("lora_rank", "fp8_param_gather", "fp8_recipe"),
            )

    @classmethod
    def from_options(cls, options: str | Iterable[str]) -> TrainingState:
        """Builds a state from texts, as a notebook's parameter and a suite give them.

        Args:
            options: Each is the ``name`` of an option to switch on, or ``name=value``, for example
                ``["grad_reduce_in_bf16", "attention_backend=unfused"]``. One text has commas between them, as
                ``papermill -p state grad_reduce_in_bf16,attention_backend=unfused`` gives it.

        Raises:
            ValueError: If a name is unknown or given twice, or a value breaks its rule.
        """
        rows = options_of(TrainingState)
        values: dict[str, Any] = {}
        for given in filter(None, options.split(",")) if isinstance(options, str) else options:
            name, equals, text = given.strip().partition("=")
            if name in values:
                raise ValueError(
                    f"option {name!r} of the training state is given twice, must be given once: leave one out"
                )
            if name not in rows:
                raise ValueError(
                    f"option {shortened(name)} of the training state is unknown, must be one of {', '.join(rows)}: "
                    "give each as name or name=value"
                )
            values[name] = _value_of(text, rows[name]) if equals else True
        return cls.of_options(values)

    @classmethod
    def of_options(cls, values: Mapping[str, Any]) -> TrainingState:
        """Builds a state from values by the names of its options, as flags and job files give them.

        Raises:
            ValueError: If a value breaks its rule.
        """
        own = {name: value for name, value in values.items() if not name.startswith(_OF_LORA)}
        adapters = {name.removeprefix(_OF_LORA): value for name, value in values.items() if name.startswith(_OF_LORA)}
        if adapters.get("rank") is not None:
            return cls(**own, lora=LoRA(**adapters))
        unread_names = [name for name in values if name.startswith(_OF_LORA) and values[name] != _default(name)]
        if unread_names:
            raise RuleError(
                f"{unread_names[0]} is {shortened(values[unread_names[0]])} without lora_rank, which alone adds "
                f"adapters: give lora_rank, or leave {unread_names[0]} out",
                *(unread_names[0], "lora_rank"),
            )
        return cls(**own)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Builds a state from what `to_dict` or `changed` returned.

        Raises:
            ValueError: If a field is unknown, not of its type, or breaks a rule.
        """
        return build(cls, values, "state")

    @property
    def keeps_optimizer_on_host(self) -> bool:
        """Whether the whole optimizer state is on the host, at any time.

        Without the precision-aware optimizer the distributed optimizer keeps main parameters on the device as well.
        """
        is_whole = self.optimizer_cpu_offload and self.optimizer_offload_fraction == 1
        return is_whole and self.use_precision_aware_optimizer

    @property
    def keeps_main_parameters_of_megatron(self) -> bool:
        """Whether the precision-aware optimizer is that for the moments alone.

        See ``use_precision_aware_optimizer_no_fp8_or_ds_fp8`` in megatron/core/optimizer/optimizer_config.py (0.16.1).
        """
        is_scaled_now = self.fp8_format is not None and self.fp8_recipe != "delayed"
        on_device = self.use_precision_aware_optimizer and not self.optimizer_cpu_offload
        return on_device and is_scaled_now and self.main_params_dtype == "fp32"

    @property
    def trains_in_part(self) -> bool:
        """Whether some parameters are frozen, which DDP's buffers do not take over."""
        return self.lora is not None or self.freeze_moe_router

    @property
    def copies_logits_in_fp32(self) -> bool:
        """Whether the loss copies all logits of a micro-batch in fp32 at once."""
        if self.num_labels is not None:
            return False
        if self.loss != "cross_entropy":
            return self.logprobs_chunk_size is None or not self.can_copy_chunks_of_logits
        return not (self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te")

    @property
    def can_copy_chunks_of_logits(self) -> bool:
        """Whether a loss that is computed from the logits can copy a chunk of them at a time in fp32."""
        return self.loss.startswith("logprobs") and not self.fp32_output

    def options(self) -> dict[str, Any]:
        """Returns the value of each option by name; `of_options` builds the state from them."""
        values = {name: getattr(self, name, one.default) for name, one in options_of(TrainingState).items()}
        adapters = () if self.lora is None else fields(self.lora)
        return values | {_OF_LORA + one.name: getattr(self.lora, one.name) for one in adapters}

    def changed(self) -> dict[str, Any]:
        """Returns the options that differ from the default, in the order of the class."""
        known = options_of(TrainingState)
        return {name: value for name, value in self.options().items() if value != known[name].default}

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        """A short name for tables and legends, such as ``grad_reduce_in_bf16, exp_avg_dtype bf16``."""
        return ", ".join(option_words(name, value) for name, value in self.changed().items()) or "default state"


_OF_LORA = "lora_"
"""How the names of the options of `LoRA` begin."""


def _default(name: str) -> Any:
    return options_of(TrainingState)[name].default


LOSS_OPTIONS = (
    *(name for name, one in options_of(TrainingState).items() if one.group == "Loss"),
    # For these the panel has no control.
    *("topk_logits_k", "gkd_logits_topk", "logit_kl_topk", "lm_loss_beside", "entropy_loss", "entropy_chunk_size"),
)
"""What only the last pipeline stage reads, and no model with a head."""
_REBUILT: tuple[Rebuilt, ...] = ("nothing", "optimizer", "model")
"""Each is a part of the next."""


def what_rebuilds(before: TrainingState, after: TrainingState) -> Rebuilt:
    """Returns what a change of the training state rebuilds."""
    old, new = before.options(), after.options()
    needs = [one.rebuilds for name, one in options_of(TrainingState).items() if new[name] != old[name]]
    part = max((part for part in needs if part is not None), key=_REBUILT.index, default=_REBUILT[0])
    # An optimizer makes its main parameters from values that FP8 parameters keep on the host only until its first build
    # (`get_high_precision_init_val`, optimizer/distrib_optimizer.py).
    return "model" if part == "optimizer" and after.fp8_param_gather else part


def option_words(name: str, value: object) -> str:
    """Writes an option of a training state for tables: its name alone if it is on, else with its value."""
    shown = ",".join(value) or "empty" if isinstance(value, tuple) else value
    return name if value is True else f"{name} {shown}"


def _value_of(text: str, one: Option) -> Any:
    """Reads a value as YAML and JSON write it; a text that is none of them stays a text, for the field's own rule."""
    if one.kind == "modules":
        return tuple(filter(None, text.split(",")))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{0,9}[.][0-9]{1,18}", text) else text
