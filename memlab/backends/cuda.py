"""A real GPU: Transformer Engine's layers, NCCL, and the caching allocator's own history as the meter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

import torch

from memlab.backends import Backend
from memlab.backends.allocator_environment import allocator_of_process, check_allocator
from memlab.backends.eager_steps import require_eager_steps
from memlab.backends.host_system import pin_to_numa_node
from memlab.config.backend_kind import KINDS
from memlab.config.cublas import multiplies_with_torch
from memlab.config.exchange_buffers import require_no_library_for_exchange
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.config.user_buffers import has_user_buffers
from memlab.config.versions import Versions
from memlab.engines.megatron.attention_environment import check_environment, check_flash_attention_is_installed
from memlab.engines.process_group import join_with_nccl, require_started_ranks
from memlab.engines.transformer_engine_caches import fill_cublas_workspaces
from memlab.meter.cuda.meter import AllocatorMeter
from memlab.started_ranks import local_rank
from memlab.upstream.patching import swapped

EARLY_VARIABLES = {"NVTE_FRAMEWORK": "pytorch", "NVTE_CPU_OFFLOAD_V1": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""What Transformer Engine and CUDA read once, and the value that Megatron needs: TE 2.10 and later copies weights to
the host with the activations unless ``NVTE_CPU_OFFLOAD_V1`` is set (NVIDIA/TransformerEngine#1762); tensor parallelism
overlaps in order on one connection (Megatron-LM, ``arguments.py``); TE imports JAX where it finds it."""

_OF_A_NEWER_CUBLAS = "cublasLtGroupedMatrixLayoutInit_internal"
"""What TE 2.13 and later ask for, and the cuBLAS that pip installs with torch 2.11 to 2.14 lacks
(labs/book/versions.md)."""

_APEX_EXTENSION = "fused_weight_gradient_mlp_cuda"

_MOST_RECOMPILES = 512
"""torch.compile runs a function uncompiled for good, silently and with other roundings, after 8 kinds of arguments
(``torch._dynamo.config.recompile_limit``). A lab changes settings and sequence lengths more often than that."""


class Unavailable(NamedTuple):
    """Why a backend cannot be used here, and what to do about it."""

    problem: str
    remedy: str


def prepare_environment() -> None:
    """Sets `EARLY_VARIABLES` that are not set, before Transformer Engine and CUDA read them."""
    for name, value in EARLY_VARIABLES.items():
        if not _is_too_late(name, value):
            os.environ.setdefault(name, value)


def check_available() -> Unavailable | None:
    """Returns why this backend cannot be used here; None if it can. Call `prepare_environment` first.

    Loads Transformer Engine, where torch has a CUDA device, to see whether it loads.
    """
    install = "pip install --no-build-isolation -e '.[gpu]'"
    if torch.version.cuda is None:
        return Unavailable(f"torch {torch.__version__} is built without CUDA", f"with an NVIDIA GPU, {install}")
    if not torch.cuda.is_available():
        return Unavailable("torch sees no CUDA device", "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES")
    too_late = [name for name, value in EARLY_VARIABLES.items() if _is_too_late(name, value)]
    if too_late:
        line = " ".join(f"{name}={EARLY_VARIABLES[name]}" for name in too_late)
        return Unavailable(f"Transformer Engine was loaded without {line}", f"restart Python with: export {line}")
    try:
        import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        remedy = f"for CUDA {torch.version.cuda} take the version that memlab pins: {install}"
        if _OF_A_NEWER_CUBLAS in reason:
            remedy = f"pip install --no-deps nvidia-cublas==13.4.0.1, which has that function, or {remedy}"
        return Unavailable(f"transformer-engine does not load ({reason})", remedy)
    return None


def _is_too_late(name: str, value: str) -> bool:
    if name in os.environ:
        return name == "NVTE_CPU_OFFLOAD_V1" and os.environ[name] != value
    return name.startswith("NVTE") and "transformer_engine" in sys.modules


def backend(reason: str) -> Backend:
    """Returns the CUDA backend.

    Raises:
        ValueError: If it cannot be used here.
    """
    prepare_environment()
    unavailable = check_available()
    if unavailable is not None:
        raise ValueError(f"backend 'cuda' cannot be used: {unavailable.problem}: {unavailable.remedy}, or choose 'cpu'")
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    # Collectives of objects and the limits of memory take the calling thread's device, not the lab's thread's.
    torch.cuda.set_device(own_device())
    return Backend(
        kind=KINDS["cuda"],
        reason=reason,
        layer_provider=TESpecProvider,
        join=join_with_nccl,
        active=on_device,
        meter=AllocatorMeter,
        check=check,
        allocator=allocator_of_process,
        versions=installed_versions,
        fill_workspaces=_fill_workspaces,
        compiles=True,
    )


def _fill_workspaces(scenario: Scenario) -> None:
    if scenario.engine == "fsdp2" or multiplies_with_torch(scenario):
        fill_cublas_workspaces()


def installed_versions(asked: Versions) -> Versions:
    """Returns the versions that this process has, whatever the default is.

    Raises:
        ValueError: If others are asked for than these, and than those that a scenario has by itself.
    """
    installed = Versions(
        transformer_engine=metadata.version("transformer-engine"),
        megatron_core=metadata.version("megatron-core"),
        torch=torch.__version__,
    )
    wrong = {name: value for name, value in asked.changed().items() if value != getattr(installed, name)}
    if wrong:
        named = ", ".join(f"{name} {value}" for name, value in wrong.items())
        here = installed.words("megatron", str(installed.megatron_core))
        raise ValueError(
            f"versions has {named}, must be what is installed here with backend 'cuda' ({here}): leave "
            "versions out, or choose backend 'simulated'"
        )
    return installed


def check(scenario: Scenario) -> None:
    """Checks that the ranks are started with these options of the allocator, and that the state's kernels are there.

    Raises:
        ValueError: If not.
    """
    require_no_library_for_exchange(scenario)
    require_started_ranks(scenario.layout)
    require_eager_steps(scenario.state)
    check_allocator(scenario.allocator)
    check_fp8_support(scenario.state)
    if scenario.state.gradient_accumulation_fusion and find_spec(_APEX_EXTENSION) is None:
        raise ValueError(
            f"gradient_accumulation_fusion is True, but needs Apex' module {_APEX_EXTENSION} for the output layer of "
            "Megatron, which is not installed here: install Apex with its CUDA extensions, leave the option out, or "
            "predict the step (memlab predict, backend 'simulated')"
        )
    if scenario.state.transformer_impl == "local":
        raise ValueError(
            "transformer_impl is 'local', which memlab does not run on a GPU: choose transformer_engine, or predict "
            "the step (memlab predict, backend 'simulated')"
        )
    if has_user_buffers(scenario):
        raise ValueError(
            "tp_comm_overlap is True, but memlab makes no user buffers on a GPU: leave it out, or predict the step "
            "(memlab predict, backend 'simulated')"
        )
    check_environment(scenario.state.attention_backend)
    if scenario.state.attention_backend == "flash":
        check_flash_attention_is_installed()


def check_fp8_support(state: TrainingState) -> None:
    """Checks that this GPU, its CUDA and Transformer Engine can use the FP8 recipe of a training state.

    Raises:
        ValueError: If not.
    """
    if state.fp8_format is None:
        return
    engine = import_module("transformer_engine.pytorch")
    is_available, reason = getattr(engine, _FP8_SUPPORT[state.fp8_recipe])(return_reason=True)
    if not is_available:
        raise ValueError(
            f"fp8_recipe is {state.fp8_recipe!r}, which cannot be used here ({reason.strip().rstrip('.')}): choose "
            "another fp8_recipe, or predict the step (memlab predict, backend 'simulated')"
        )

    capability = torch.cuda.get_device_capability()
    needs_none = (10, 0) <= capability < (12, 0) or capability >= (13, 0)
    if state.fp8_recipe in ("delayed", "tensorwise") and state.non_tn_fp8_gemm != needs_none:
        raise ValueError(
            f"non_tn_fp8_gemm is {state.non_tn_fp8_gemm}, must be {needs_none} on this GPU, which decides it: give "
            f"non_tn_fp8_gemm {needs_none}, or predict the step (memlab predict, backend 'simulated')"
        )


_FP8_SUPPORT = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Transformer Engine's own questions, by recipe."""


def own_device() -> int:
    """Returns the device of this process: its number among the ranks of the machine.

    Raises:
        ValueError: If this process sees no GPU of that number, or the number is missing beside other ranks.
    """
    number, num_devices = local_rank(), torch.cuda.device_count()
    if number >= num_devices:
        raise ValueError(
            f"the environment variable LOCAL_RANK is {number}, must be below the {num_devices} GPUs that this process "
            "sees: start fewer ranks on this machine, or let CUDA_VISIBLE_DEVICES name a GPU for each of them"
        )
    return number


@contextmanager
def on_device() -> Iterator[None]:
    """Makes this rank's device the current one on this thread, and keeps the thread on processors near the device."""
    with torch.cuda.device(own_device()), _many_recompiles():
        pin_to_numa_node(own_device())
        yield


@contextmanager
def _many_recompiles() -> Iterator[None]:
    from torch._dynamo.config import _config  # made when the module is imported

    # The defaults: a value that is assigned holds on one thread only (torch 2.13), and autograd's compiles too.
    limits = {"recompile_limit": _MOST_RECOMPILES, "accumulated_recompile_limit": 64 * _MOST_RECOMPILES}
    with swapped((_config[name], "default", limit) for name, limit in limits.items()):
        yield
