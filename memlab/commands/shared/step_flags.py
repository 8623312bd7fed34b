"""The flags that describe a step: what is run, how it is spread over ranks, and under which memory settings."""

from __future__ import annotations

import argparse

from memlab.commands.shared.job_flags import add_job_file_options
from memlab.commands.shared.option_flags import add_option_flags, whole_number
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import known_names
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.versions import MEASURED, TITLES, Versions
from memlab.fitting.outside_torch import outside_torch_of
from memlab.units import format_bytes, parse_bytes

_LARGEST_MEMORY_BYTES = 2**50

_GROUPS: dict[str, type] = {
    "workload": Scenario,
    "parallel layout (Megatron's names; the remaining ranks are data parallel)": Layout,
    "training state (Megatron's names)": TrainingState,
    "torch's allocator (as in PYTORCH_CUDA_ALLOC_CONF)": AllocatorSettings,
    "memory settings (Megatron's names)": MemorySettings,
}


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `measure`, `predict` and `search`. `Scenario` and `MemorySettings` have their rules."""
    parser.add_argument(
        "architecture",
        metavar="ARCH",
        nargs="?",
        help=f"model: {known_names()}, its name on Hugging Face, or the path of a Hugging Face config.json",
    )
    add_job_file_options(parser)
    for title, cls in _GROUPS.items():
        add_option_flags(parser.add_argument_group(title), cls)


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
        versions.add_argument(f"--{name.replace('_', '-')}", metavar="X.Y", help=text)
    group = parser.add_argument_group("job")
    group.add_argument(
        "--world-size",
        type=whole_number,
        metavar="N",
        help="number of ranks in the job, a multiple of the number that the parallel sizes need (default: what the "
        "file of --job says, otherwise 1)",
    )
    group.add_argument(
        "--data-parallel-size",
        type=whole_number,
        metavar="N",
        help="number of copies of the model, or with `--engine fsdp2` of ranks that share it, instead of --world-size",
    )
    group.add_argument(
        "--pipeline-model-parallel-layout",
        metavar="LAYERS",
        help="which layers each chunk of each pipeline stage has, as Megatron-LM's flag says it: Ett|tt|ttL is the "
        "embedding and two layers, two layers, and two layers and the loss (default: all stages have the same number)",
    )
    group.add_argument(
        "--routing",
        metavar="CHOICE",
        help="how tokens are routed to experts: balanced (default), random:SEED, skewed:FACTOR (the first expert gets "
        "FACTOR times the mean), or a JSON list, given here or as the path of a file. The list has either the share of "
        "each expert, or for each layer a list with the number of tokens of each expert",
    )


def limit_for_torch(gpu_memory_bytes: int, scenario: Scenario) -> int:
    """Returns how many bytes of a GPU torch's allocator can have.

    Raises:
        ValueError: If there are none.
    """
    outside_torch_bytes = outside_torch_of(scenario).total_bytes
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


def memory_size(text: str) -> int:
    """Reads a flag's size, such as ``80GiB``."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if num_bytes > _LARGEST_MEMORY_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than any GPU's memory: give a size such as 80GiB")
    return num_bytes
