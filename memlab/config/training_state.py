"""Which tensors training keeps and computes with: precisions, the optimizer, the loss, attention and FP8.

Names and defaults are Megatron's (``megatron/training/arguments.py``, ``optimizer_config.py``,
``distributed_data_parallel_config.py`` and ``transformer_config.py``, 0.16.1). A change needs other tensors, so it
rebuilds the optimizer or the model. What changes in place between two steps is in `MemorySettings`. A combination that
Megatron refuses is refused here, in one line, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from memlab.config.from_json import build
from memlab.config.validation import check_number, check_whole_number, shortened

LOSS_OPTIONS = (
    "loss", "fp32_output", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "logprobs_chunk_size",
)  # fmt: skip

MainGradsDtype = Literal["fp32", "bf16"]
MainParamsDtype = Literal["fp32", "fp16"]
MomentDtype = Literal["fp32", "fp16", "bf16", "fp8"]
Loss = Literal[
    "cross_entropy", "logprobs", "logprobs_one_hot", "logprobs_by_sequence", "vocab_parallel_cross_entropy", "softmax",
    "scaled_softmax", "log_softmax", "topk_logits",
]  # fmt: skip
CrossEntropyFusionImpl = Literal["native", "te"]
AttentionBackend = Literal["auto", "fused", "flash", "unfused"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]

CHOICES: dict[str, tuple[str, ...]] = {
    "main_grads_dtype": get_args(MainGradsDtype),
    "main_params_dtype": get_args(MainParamsDtype),
    "exp_avg_dtype": get_args(MomentDtype),
    "exp_avg_sq_dtype": get_args(MomentDtype),
    "loss": get_args(Loss),
    "cross_entropy_fusion_impl": get_args(CrossEntropyFusionImpl),
    "attention_backend": get_args(AttentionBackend),
    "fp8_format": get_args(Fp8Format),
    "fp8_recipe": get_args(Fp8Recipe),
}
"""The values of each option that is a choice; `fp8_format` may be None as well."""
READ_CHUNK_SIZE = ("logprobs", "logprobs_one_hot", "logprobs_by_sequence", "softmax", "scaled_softmax")
"""Losses that read `logprobs_chunk_size`."""
_OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_MOST_ELEMENTS_OF_A_BUCKET = 2**40
_MOST_TOKENS_OF_A_CHUNK = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Precision and place of gradients and optimizer state, and how loss, attention and matrices are computed.

    The default is plain Megatron in bf16: fp32 gradients, the distributed optimizer with fp32 main parameters and
    moments, an unfused loss, cuDNN's attention, no FP8.

    Raises:
        ValueError: If a rule is broken. The message is one line with the value, the rule and what to do.
    """

    use_distributed_optimizer: bool = True
    """Split the optimizer state over the data-parallel ranks; False keeps all of it on each rank."""
    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bf16, in place of fp32.

    Without the precision-aware optimizer Megatron copies them to fp32 for the update, and sets the copies to None only
    when the next step zeroes its gradients. So `StepRecord.static_bytes`, the bytes when a step begins, include 4 bytes
    of copies per parameter; between the zeroing and the next update the copies are not allocated.
    """
    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket while backward computes the next one."""
    overlap_param_gather: bool = False
    """Gather the parameters of a bucket while forward computes with the one before it. Without `overlap_grad_reduce`,
    each buffer is a single bucket, which is gathered when forward begins. (Megatron-Core's DDP allows this; the
    arguments of Megatron-LM's own scripts do not.)"""
    ddp_bucket_size: int | None = None
    """Elements of a bucket; None takes Megatron's rule, and has an effect only with an overlap."""
    gradient_accumulation_fusion: bool = False
    """Add each weight's gradient to its buffer in the matrix product that computes it. Megatron-Core's own default is
    False; Megatron-LM's arguments and Megatron-Bridge's providers switch it on. Transformer Engine then keeps, between
    steps too, an unused gradient in the weights' type for every shape of weight."""

    use_precision_aware_optimizer: bool = False
    """Let Transformer Engine's Adam hold the main parameters, and store them and the moments in other types."""
    main_grads_dtype: MainGradsDtype = "fp32"
    """Type of the gradients that the optimizer reads. Megatron-Core ignores this option. With the
    precision-aware optimizer, `grad_reduce_in_bf16` decides the type; without it, the type is always fp32."""
    main_params_dtype: MainParamsDtype = "fp32"
    """Type of the main parameters; with ``fp32``, only the 16 bits that the bf16 parameters lack are stored. With an
    `fp8_recipe` other than ``delayed``, Megatron itself keeps the fp32 main parameters, with all 32 bits."""
    exp_avg_dtype: MomentDtype = "fp32"
    """Type of Adam's first moment. A moment of another type than fp32 is copied to fp32 during the update, as a whole.

    ``fp8`` takes 2 bytes per parameter, as ``bf16`` does: Transformer Engine stores FP8 twice, once transposed.
    """
    exp_avg_sq_dtype: MomentDtype = "fp32"
    """Type of Adam's second moment."""
    optimizer_cpu_offload: bool = False
    """Keep main parameters and moments in host memory, and update them on the CPU (`HybridDeviceOptimizer`)."""
    optimizer_offload_fraction: float = 1.0
    """Share of the parameters whose state is on the CPU under `optimizer_cpu_offload`, from 0 to 1."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Under `optimizer_cpu_offload`, transfer gradients and parameters while the CPU updates others."""
    pin_cpu_grads: bool = True
    """Under `optimizer_cpu_offload`, page-lock the gradients on the host, so that copies are faster."""
    pin_cpu_params: bool = True
    """Under `optimizer_cpu_offload`, page-lock the parameters on the host."""
    manual_gc: bool = False
    """Collect Python's garbage before the first step, as Megatron's ``--manual-gc`` does. Without it, the fp32 copies
    that Megatron makes for its CPU optimizer and then discards stay allocated
    (`memlab.engines.megatron.cpu_optimizer`)."""

    loss: Loss = "cross_entropy"
    """``cross_entropy`` is Megatron's language-model loss, which the model computes. The others are computed from the
    logits that the model returns: what each has in memory, and whose it is, says
    `memlab.engines.megatron.losses.LOSSES`."""
    fp32_output: bool = False
    """Copy the logits to fp32 when the model returns them, as Megatron's ``Float16Module`` does by default. Only losses
    that are computed from the logits read it, and only in bf16."""
    cross_entropy_loss_fusion: bool = False
    """Compute the cross entropy with fewer kernels."""
    cross_entropy_fusion_impl: CrossEntropyFusionImpl = "native"
    """Whose fused cross entropy: Megatron's compiled one, or Transformer Engine's kernel, which overwrites the logits.
    megatron-core 0.19 warns of the latter, and its ``megatron/training/arguments.py`` refuses it."""
    logprobs_chunk_size: int | None = None
    """Tokens of each sequence whose log-probabilities are computed at once; None computes all at once."""

    attention_backend: AttentionBackend = "auto"
    """Which attention Transformer Engine uses; ``auto`` chooses."""
    apply_rope_fusion: bool = False
    """Rotate queries and keys in one kernel."""
    bias_activation_fusion: bool = True
    """Compute the activation of MLPs, SwiGLU, in one kernel. Megatron-LM's arguments switch it on. Megatron-Core's own
    default is False: SiLU of the gate, the other half and, of experts, the product are then tensors of their own, which
    are kept for backward."""

    deallocate_pipeline_outputs: bool = False
    """Free what a pipeline stage has sent to the next one, and keep only its graph for backward. Megatron-Core's own
    default is False; Megatron-LM's arguments and Megatron-Bridge's providers always set it."""

    fp8_format: Fp8Format | None = None
    """Multiply in FP8: ``e4m3`` everywhere, or ``hybrid`` with e5m2 for gradients; None multiplies in `dtype`."""
    fp8_recipe: Fp8Recipe = "delayed"
    """How FP8 tensors are scaled; ``mxfp8`` needs Blackwell, and memlab has never compared it with a measurement."""
    fp8_param_gather: bool = False
    """Store the matrices' parameters in FP8 themselves (Megatron's ``--fp8-param-gather``)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default in (True, False) and not isinstance(value, bool) and field.type == "bool":
                raise ValueError(f"{field.name} is {shortened(value)}, must be True or False: choose one of them")
        for name, choices in CHOICES.items():
            if name != "fp8_format" or self.fp8_format is not None:
                _one_of(name, getattr(self, name), choices)
        for name, at_most in (
            ("ddp_bucket_size", _MOST_ELEMENTS_OF_A_BUCKET),
            ("logprobs_chunk_size", _MOST_TOKENS_OF_A_CHUNK),
        ):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name), at_most=at_most)
        check_number(
            "optimizer_offload_fraction", self.optimizer_offload_fraction, None, 1, action="give a share from 0 to 1"
        )
        self._check_optimizer()
        self._check_loss()
        self._check_fp8()

    def _check_optimizer(self) -> None:
        if not self.use_precision_aware_optimizer:
            for name in _OPTIMIZER_DTYPES:
                if getattr(self, name) != "fp32":
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, must be fp32 without the precision-aware optimizer, by a "
                        f"rule of Megatron-Core: set use_precision_aware_optimizer, or leave {name} out"
                    )
        elif not self.use_distributed_optimizer:
            raise ValueError(
                "use_precision_aware_optimizer is True, but needs the distributed optimizer, by a rule of "
                "Megatron-Core: set use_distributed_optimizer, or leave use_precision_aware_optimizer out"
            )
        if self.optimizer_cpu_offload and not self.use_distributed_optimizer:
            # Float16OptimizerWithFloat16Params replaces the parameters that HybridDeviceOptimizer looks up later.
            raise ValueError(
                "optimizer_cpu_offload is True without the distributed optimizer, where Megatron's CPU optimizer "
                "fails: set use_distributed_optimizer, or leave optimizer_cpu_offload out"
            )

    def _check_loss(self) -> None:
        if self.logprobs_chunk_size is not None and self.loss not in READ_CHUNK_SIZE:
            raise ValueError(
                f"logprobs_chunk_size is {self.logprobs_chunk_size}, but only the losses {', '.join(READ_CHUNK_SIZE)} "
                f"read it, and loss is {self.loss!r}: choose one of them, or leave logprobs_chunk_size out"
            )
        if self.fp32_output and self.loss == "cross_entropy":
            raise ValueError(
                "fp32_output is True, but loss 'cross_entropy' does not read it, since the model returns no logits: "
                "choose another loss, or leave fp32_output out"
            )
        if self.cross_entropy_loss_fusion and self.loss != "cross_entropy":
            raise ValueError(
                f"cross_entropy_loss_fusion is True, but only loss 'cross_entropy' reads it, and loss is "
                f"{self.loss!r}: choose loss 'cross_entropy', or leave cross_entropy_loss_fusion out"
            )

    def _check_fp8(self) -> None:
        if self.fp8_param_gather and self.fp8_format is None:
            raise ValueError(
                "fp8_param_gather is True, but needs an fp8_format: set fp8_format 'e4m3' or 'hybrid', or leave "
                "fp8_param_gather out"
            )
        if self.fp8_param_gather and self.fp8_recipe == "mxfp8":
            raise ValueError(
                "fp8_param_gather is True with fp8_recipe 'mxfp8', which memlab does not predict yet (Megatron "
                "keeps mxfp8 "
                "parameters in the gradients' buffer): choose another fp8_recipe, or leave fp8_param_gather out"
            )
        if self.fp8_param_gather and not self.use_distributed_optimizer:
            raise ValueError(
                "fp8_param_gather is True without the distributed optimizer, which alone writes FP8 parameters: set "
                "use_distributed_optimizer, or leave fp8_param_gather out"
            )
        if self.fp8_param_gather and self.optimizer_cpu_offload and self.fp8_recipe != "delayed":
            raise ValueError(
                f"fp8_recipe is {self.fp8_recipe!r} with fp8_param_gather and optimizer_cpu_offload, which the "
                "arguments of Megatron-LM refuse and memlab does not predict: choose 'delayed', or leave one of the "
                "two options out"
            )
        if self.fp8_param_gather and self.use_precision_aware_optimizer:
            self._check_main_parameters_of_fp8()

    def _check_main_parameters_of_fp8(self) -> None:
        # Under 'delayed', and with fp16 main parameters, Transformer Engine's Adam holds them (optimizer_config.py). Of
        # fp32 ones it stores int16 remainders, which its kernel for FP8 parameters refuses (multi_tensor/adam.cu). Of
        # other recipes' parameters Megatron gives it None (distrib_optimizer.py).
        needed = "fp16" if self.fp8_recipe == "delayed" else "fp32"
        if self.main_params_dtype != needed and not self.optimizer_cpu_offload:
            raise ValueError(
                f"main_params_dtype is {self.main_params_dtype!r} with fp8_param_gather, fp8_recipe "
                f"{self.fp8_recipe!r} and the precision-aware optimizer, must be {needed!r} there, because the "
                "step fails "
                f"otherwise: choose {needed!r}, or leave fp8_param_gather out"
            )

    @classmethod
    def from_options(cls, options: Iterable[str]) -> TrainingState:
        """Builds a state from texts, as a notebook's parameter and a suite give them.

        Args:
            options: Each is the ``name`` of an option to switch on, or ``name=value``, for example
                ``["grad_reduce_in_bf16", "attention_backend=unfused"]``.

        Raises:
            ValueError: If a name is unknown or given twice, or a value breaks its rule.
        """
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for option in options:
            name, equals, text = option.partition("=")
            if name in values:
                raise ValueError(
                    f"option {name!r} of the training state is given twice, must be given once: leave one out"
                )
            if name not in names:
                raise ValueError(
                    f"option {shortened(name)} of the training state is unknown, must be one of {', '.join(names)}: "
                    "give each as name or name=value"
                )
            values[name] = _value_of(text) if equals else True
        return cls(**values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingState:
        """Builds a state from what `to_dict` or `changed` returned.

        Raises:
            ValueError: If a field is unknown, not of its type, or breaks a rule.
        """
        return build(cls, values, "state")

    def without_effect(self) -> dict[str, str]:
        """Names the options that Megatron accepts and then ignores, each with the reason."""
        reasons: dict[str, str] = {}
        default = TrainingState()

        def ignored(name: str, reason: str) -> None:
            if getattr(self, name) != getattr(default, name):
                reasons[name] = reason

        if not self.optimizer_cpu_offload:
            for name in (
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "pin_cpu_grads",
                "pin_cpu_params",
            ):
                ignored(name, "only optimizer_cpu_offload reads it")
            ignored("manual_gc", "only optimizer_cpu_offload leaves large tensors for the garbage collector")
        else:
            self._without_effect_on_cpu_optimizer(ignored)
        if not self.grad_reduce_in_bf16:
            buffers = (
                "Adam reads the gradients in the type in which they are reduced, which is fp32 without "
                "grad_reduce_in_bf16"
            )
            ignored(
                "main_grads_dtype",
                f"{buffers} (Megatron-LM's command line also sets grad_reduce_in_bf16, but Megatron-Core does not)",
            )
        if not self.use_distributed_optimizer:
            ignored("overlap_param_gather", "only the distributed optimizer leaves parameters that must be gathered")
        if not self.overlap_grad_reduce:
            ignored("ddp_bucket_size", "without overlap_grad_reduce Megatron reduces each buffer as a single bucket")
        if not self.cross_entropy_loss_fusion:
            ignored("cross_entropy_fusion_impl", "only cross_entropy_loss_fusion reads it")
        if self.fp8_format is None:
            ignored("fp8_recipe", "no fp8_format is given, so nothing is multiplied in FP8")
        return reasons

    @property
    def keeps_optimizer_on_host(self) -> bool:
        """Whether the whole optimizer state is on the host, at any time.

        Without the precision-aware optimizer the distributed optimizer keeps main parameters on the device as well.
        """
        is_whole = self.optimizer_cpu_offload and self.optimizer_offload_fraction == 1
        return is_whole and self.use_precision_aware_optimizer

    def _without_effect_on_cpu_optimizer(self, ignored: Callable[[str, str], None]) -> None:
        # megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, 0.16.1 and 0.19.2
        ignored(
            "pin_cpu_params",
            "Megatron's CPU optimizer ignores this option, and always pins the parameters when it copies them",
        )
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            ignored(name, "Megatron's CPU optimizer ignores this option: main parameters and moments are fp32")
        if self.optimizer_offload_fraction == 0:
            reason = "optimizer_offload_fraction is 0, so the whole state stays on the device"
            copies = "" if self.manual_gc else ", beside fp32 copies that Megatron discards: manual_gc frees them"
            ignored("optimizer_cpu_offload", reason + copies)
            for name in ("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads"):
                ignored(name, reason)

    @property
    def copies_logits_in_fp32(self) -> bool:
        """Whether the loss copies all logits of a micro-batch in fp32 at once."""
        if self.loss != "cross_entropy":
            return self.logprobs_chunk_size is None or not self.can_copy_chunks_of_logits
        return not (self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te")

    @property
    def can_copy_chunks_of_logits(self) -> bool:
        """Whether a loss that is computed from the logits can copy a chunk of them at a time in fp32."""
        return self.loss.startswith("logprobs") and not self.fp32_output

    def changed(self) -> dict[str, Any]:
        """Returns the fields that differ from the default, in the order of the class."""
        default = TrainingState()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        """A short name for tables and legends, such as ``grad_reduce_in_bf16, exp_avg_dtype bf16``."""
        return ", ".join(option_words(name, value) for name, value in self.changed().items()) or "default state"


def option_words(name: str, value: object) -> str:
    """Writes an option of a training state for tables: its name alone if it is on, else with its value."""
    return name if value is True else f"{name} {value}"


def _value_of(text: str) -> Any:
    """Reads a value as YAML and JSON write it; a text that is none of them stays a text, for the field's own rule."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{0,9}[.][0-9]{1,18}", text) else text


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {shortened(value)}, must be one of {', '.join(choices)}: choose one of them")
