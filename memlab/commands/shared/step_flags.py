"""The flags that describe a step: what is run, how it is spread over ranks, and under which memory settings."""

from __future__ import annotations

import argparse
import re

from memlab.commands.shared.job_flags import add_job_file_options
from memlab.config.architectures import ARCHITECTURES
from memlab.config.layout import Layout
from memlab.config.scenario import DTYPES
from memlab.config.settings import (
    CHECKPOINT_INPUT_REMEDIES,
    OFFLOAD_MODULES,
    RECOMPUTE_GRANULARITIES,
    RECOMPUTE_METHODS,
    RECOMPUTE_MODULES,
)
from memlab.config.training_state import CHOICES
from memlab.config.versions import MEASURED, TITLES, Versions
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.units import format_bytes, parse_bytes

_LARGEST_MEMORY_BYTES = 2**50

_LAYOUT_HELP = {
    "tensor-model": "number of ranks that share each layer's matrices; 2 or more also switch on sequence "
    "parallelism (default 1)",
    "context": "number of ranks that share each sequence (default 1)",
    "pipeline-model": "number of pipeline stages (default 1)",
    "virtual-pipeline-model": "number of model chunks per stage; with 2 or more, the schedule is interleaved "
    "(default 1)",
    "expert-model": "number of ranks that share the experts of a layer (default 1)",
    "expert-tensor": "number of ranks that share the matrices of an expert (default: the tensor parallel size)",
}


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `measure`, `predict` and `search`. `Scenario` and `MemorySettings` have their rules."""
    parser.add_argument(
        "architecture",
        metavar="ARCH",
        nargs="?",
        help=f"model: {', '.join(ARCHITECTURES)}, or the path of a Hugging Face config.json",
    )
    add_job_file_options(parser)
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--num-layers", type=whole_number, metavar="N", help="build only the first N layers of the model (default: all)"
    )
    workload.add_argument(
        "--seq-length", type=whole_number, metavar="N", help="tokens in a sequence (default: depends on ARCH)"
    )
    workload.add_argument(
        "--micro-batch-size", type=whole_number, metavar="N", help="sequences in a micro-batch (default 1)"
    )
    workload.add_argument(
        "--num-microbatches", type=whole_number, metavar="N", help="micro-batches in a step (default 1)"
    )
    workload.add_argument(
        "--packed-sequences",
        type=whole_number,
        metavar="N",
        help="pack N sequences of about equal length into a micro-batch of one row; --seq-length is then the number of "
        "tokens in the row (default: each sequence has a row of its own). Under context parallelism, --seq-length "
        "must be a multiple of twice the context parallel size; memlab makes each sequence's length such a multiple",
    )
    workload.add_argument(
        "--seed", type=whole_number, metavar="N", help="seed of the weights and the data (default 1234)"
    )
    workload.add_argument("--dtype", metavar=_choices(DTYPES), help="type of parameters and activations (default bf16)")
    workload.add_argument(
        "--expert-buffers",
        action="store_true",
        default=None,
        help="keep the parameters and gradients of the experts in separate buffers, as Megatron does under expert "
        "parallelism",
    )
    layout = parser.add_argument_group("parallel layout (Megatron's names; the remaining ranks are data parallel)")
    for name, text in _LAYOUT_HELP.items():
        layout.add_argument(f"--{name}-parallel-size", type=whole_number, metavar="N", help=text)
    for place in ("first", "last"):
        layout.add_argument(
            f"--num-layers-in-{place}-pipeline-stage",
            type=whole_number,
            metavar="N",
            help=f"number of layers in the {place} stage (default: all stages have the same number)",
        )
    _add_state_arguments(parser.add_argument_group("training state (Megatron's names)"))
    _add_allocator_arguments(parser.add_argument_group("torch's allocator (as in PYTORCH_CUDA_ALLOC_CONF)"))
    _add_settings_arguments(parser.add_argument_group("memory settings (Megatron's names)"))


_SWITCHES = {
    "grad_reduce_in_bf16": "accumulate and reduce gradients in bf16 (default: fp32)",
    "overlap_grad_reduce": "reduce the gradients of a bucket while backward computes the next one",
    "overlap_param_gather": "gather the parameters of a bucket while forward computes with those of the previous one",
    "use_precision_aware_optimizer": (
        "let Transformer Engine's Adam hold the main parameters; --main-params-dtype, --main-grads-dtype, "
        "--exp-avg-dtype and --exp-avg-sq-dtype need this flag"
    ),
    "optimizer_cpu_offload": "keep main parameters and moments on the host, and update them on the CPU",
    "overlap_cpu_optimizer_d2h_h2d": "with --optimizer-cpu-offload: transfer some tensors while the CPU updates others",
    "manual_gc": "collect Python's garbage before the first step; this frees memory only with --optimizer-cpu-offload",
    "fp32_output": "with a --loss other than cross_entropy: copy the logits to fp32 when the model returns them",
    "cross_entropy_loss_fusion": "compute the cross entropy with fewer kernels",
    "apply_rope_fusion": "apply the rotary embedding to queries and keys in one kernel",
    "deallocate_pipeline_outputs": (
        "free what a pipeline stage has sent to the next one, as Megatron-LM and Megatron-Bridge always do"
    ),
    "fp8_param_gather": "store the weight matrices in FP8",
}
_CHOICE_HELP = {
    "main_grads_dtype": (
        "type of the gradients that the optimizer reads (default fp32); Megatron-Core ignores it, so no bytes "
        "change: the actual type is fp32, or, with --use-precision-aware-optimizer, the type in which gradients are "
        "reduced"
    ),
    "main_params_dtype": "type of the main parameters (default fp32)",
    "exp_avg_dtype": "type of Adam's first moment (default fp32)",
    "exp_avg_sq_dtype": "type of Adam's second moment (default fp32)",
    "loss": (
        "cross_entropy: language-model loss, which the model computes (default); the others are computed from the "
        "logits: those of SkyRL (logprobs), NeMo-RL (logprobs_by_sequence or logprobs_one_hot; topk_logits for its "
        "distillation), verl (vocab_parallel_cross_entropy), slime (softmax or scaled_softmax) and ms-swift "
        "(log_softmax)"
    ),
    "cross_entropy_fusion_impl": (
        "fused cross entropy of Megatron (native) or of Transformer Engine (te) (default native)"
    ),
    "attention_backend": "which attention Transformer Engine uses (default auto)",
    "fp8_format": "multiply matrices in this FP8 format (default: multiply them in --dtype)",
    "fp8_recipe": "how FP8 tensors are scaled (default delayed); no prediction for mxfp8 has ever been compared "
    "with a measurement on a GPU",
}


def _add_state_arguments(state: argparse._ArgumentGroup) -> None:
    for name, text in _SWITCHES.items():
        state.add_argument(_flag(name), action="store_true", default=None, help=text)
    for name, text in _CHOICE_HELP.items():
        state.add_argument(_flag(name), metavar=_choices(CHOICES[name]), help=text)
    for flag, text in (
        ("--no-use-distributed-optimizer", "keep the whole optimizer state on every data-parallel rank"),
        ("--no-pin-cpu-grads", "with --optimizer-cpu-offload: do not page-lock the gradients on the host"),
        ("--no-pin-cpu-params", "with --optimizer-cpu-offload: do not page-lock the parameters on the host"),
    ):
        state.add_argument(
            flag, dest=flag.removeprefix("--no-").replace("-", "_"), action="store_false", default=None, help=text
        )
    state.add_argument(
        "--optimizer-offload-fraction",
        type=_number,
        metavar="F",
        help="with --optimizer-cpu-offload: share of the parameters whose state is on the host, 0 to 1 (default 1)",
    )
    state.add_argument(
        "--ddp-bucket-size",
        type=whole_number,
        metavar="N",
        help="elements in a bucket of gradients; used only with --overlap-grad-reduce (default: Megatron's rule)",
    )
    state.add_argument(
        "--logprobs-chunk-size",
        type=whole_number,
        metavar="N",
        help="with the losses logprobs, logprobs_one_hot, logprobs_by_sequence, softmax and scaled_softmax: tokens "
        "whose log-probabilities are computed at once (default: all)",
    )


def _add_allocator_arguments(allocator: argparse._ArgumentGroup) -> None:
    allocator.add_argument(
        "--expandable-segments",
        action="store_true",
        default=None,
        help="enlarge the segments that are reserved already, instead of reserving more segments",
    )
    allocator.add_argument(
        "--garbage-collection-threshold",
        type=_number,
        metavar="F",
        help="when torch has reserved more than this share of the memory that it may reserve, it frees cached "
        "blocks before it reserves more "
        "(default: never)",
    )
    allocator.add_argument(
        "--max-split-size-mb",
        type=whole_number,
        metavar="N",
        help="split only blocks of at most N MiB (default: no limit)",
    )


def _add_settings_arguments(settings: argparse._ArgumentGroup) -> None:
    settings.add_argument(
        "--recompute-granularity",
        metavar=_choices(RECOMPUTE_GRANULARITIES),
        help="full: backward recomputes whole layers; selective: it recomputes only --recompute-modules",
    )
    settings.add_argument(
        "--recompute-method",
        metavar=_choices(RECOMPUTE_METHODS),
        help="with full granularity: uniform recomputes all layers, block only the first ones",
    )
    settings.add_argument(
        "--recompute-num-layers",
        type=whole_number,
        metavar="N",
        help="uniform: number of layers per checkpoint; block: number of layers to recompute",
    )
    settings.add_argument(
        "--recompute-modules",
        type=_names,
        metavar="A,B",
        help=f"with selective granularity: some of {', '.join(RECOMPUTE_MODULES)}",
    )
    settings.add_argument(
        "--checkpoint-input-remedy",
        metavar=_choices(CHECKPOINT_INPUT_REMEDIES),
        help="how to free the inputs that checkpoints of MoE layers keep allocated after backward (default: none)",
    )
    settings.add_argument(
        "--offload-modules",
        type=_names,
        metavar="A,B",
        help="copy the saved tensors of these modules to the host in forward, and back for backward: some of "
        f"{', '.join(OFFLOAD_MODULES)}",
    )
    settings.add_argument(
        "--min-offloaded-tensor-size",
        type=whole_number,
        metavar="N",
        help="offload only tensors of at least N elements (default 1048576, as in Megatron)",
    )
    settings.add_argument(
        "--activation-offload-fraction",
        type=_number,
        metavar="F",
        help="share of the groups of --offload-modules to offload, 0 to 1; a group is what a module saves in one layer "
        "(default 1; needs megatron-core 0.19)",
    )
    settings.add_argument(
        "--delta-offload-bytes-across-pp-ranks",
        type=whole_number,
        metavar="N",
        help="number of bytes that each pipeline stage leaves on the device in addition to those of the stage before "
        "it (default 0; needs megatron-core 0.19)",
    )
    settings.add_argument(
        "--fine-grained-offloading-max-inflight-offloads",
        type=whole_number,
        metavar="N",
        help="number of transfers per offload module that may still be in progress while the model computes "
        "(default: no limit; needs megatron-core 0.19)",
    )
    settings.add_argument(
        "--offload-parameters", action="store_true", default=None, help="keep parameters on the host between steps"
    )
    settings.add_argument(
        "--offload-gradients",
        action=argparse.BooleanOptionalAction,
        help="free the gradient buffers between steps (default: yes if --offload-optimizer is given, otherwise no)",
    )
    settings.add_argument(
        "--offload-optimizer", action="store_true", default=None, help="keep optimizer state on the host between steps"
    )
    settings.add_argument(
        "--offload-optimizer-except-update",
        action="store_true",
        default=None,
        help="keep optimizer state on the host in forward and backward too, and load it only for the update",
    )


def add_pass_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what makes a pass something other than a training step with unlimited memory."""
    group = parser.add_argument_group("step")
    group.add_argument(
        "--forward-only",
        action="store_true",
        help="take a forward-only pass (no gradients, no backward, no optimizer), as reinforcement learning does for "
        "log-probabilities; a warm-up pass before it is not recorded",
    )
    group.add_argument(
        "--device-memory",
        type=memory_size,
        metavar="SIZE",
        help="limit torch's allocator to this size, such as 16GiB; memory that is used outside torch does not count; "
        "a step that needs more runs out of memory",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what only a predicted job has."""
    parser.add_argument(
        "--no-replay",
        dest="replay",
        action="store_false",
        help="run every layer and every micro-batch, even if it is known to repeat an earlier one; this takes longer "
        "and predicts the same bytes",
    )
    versions = parser.add_argument_group("versions of the job's machines (whatever is installed here)")
    for name, title in TITLES.items():
        known = ", ".join(MEASURED[name])
        default = f"default {getattr(Versions(), name) or 'the installed one, whose code a prediction runs'}"
        text = f"release of {title}; predictions were compared with measurements with {known} ({default})"
        versions.add_argument(_flag(name), metavar="X.Y", help=text)
    group = parser.add_argument_group("job")
    group.add_argument(
        "--world-size",
        type=whole_number,
        metavar="N",
        help="number of ranks in the job, a multiple of the number that the parallel sizes need (default: what the "
        "file of --job says, otherwise 1)",
    )
    group.add_argument(
        "--routing",
        metavar="CHOICE",
        help="how tokens are routed to experts: balanced (default), random:SEED, skewed:FACTOR (the first expert gets "
        "FACTOR times the mean), or a JSON list, given here or as the path of a file. The list has either the share of "
        "each expert, or for each layer a list with the number of tokens of each expert",
    )


def limit_for_torch(gpu_memory_bytes: int, layout: Layout) -> int:
    """Returns how many bytes of a GPU torch's allocator can have.

    Raises:
        ValueError: If there are none.
    """
    outside_torch_bytes = estimate_outside_torch(layout).total_bytes
    if gpu_memory_bytes <= outside_torch_bytes:
        outside = format_bytes(outside_torch_bytes)
        raise ValueError(
            f"--gpu-memory is {format_bytes(gpu_memory_bytes)}, must be more than the {outside} that CUDA and its "
            "libraries take (an estimate): give a larger size with its unit, such as 79GiB"
        )
    return gpu_memory_bytes - outside_torch_bytes


def rank_or_all(text: str) -> int | None:
    """Reads a flag's rank; None is one rank of each kind."""
    return None if text == "all" else whole_number(text)


def whole_number(text: str) -> int:
    """Reads a flag's number. `int` would also take ``1_000``, spaces and the digits of every script."""
    if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _number(text: str) -> float:
    """Reads a flag's share. `float` would also take ``nan``, ``1_0`` and the digits of every script."""
    if not re.fullmatch(r"[+-]?[0-9]{0,30}[.]?[0-9]{1,30}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5")
    return float(text)


def memory_size(text: str) -> int:
    """Reads a flag's size, such as ``80GiB``."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if num_bytes > _LARGEST_MEMORY_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than any GPU's memory: give a size such as 80GiB")
    return num_bytes


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _choices(values: tuple[str, ...]) -> str:
    return "{" + ",".join(values) + "}"
