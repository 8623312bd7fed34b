"""What Transformer Engine and cuBLAS keep on the device for the whole process, and how it is freed.

Read in ``transformer_engine/pytorch``, 2.12.0 and 2.16.1: ``cpp_extensions/gemm.py``, ``module/base.py``,
``quantization.py``, and ``utils.py``, ``context_parallel.py`` and ``softmax.py`` of
``attention/dot_product_attention``. Without TE nothing is kept.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import torch

from memlab.config.cublas import CUBLAS_WORKSPACE_BYTES, CUBLASLT_WORKSPACE_BYTES
from memlab.meter.labels import Product, allocated_at_first, keeping

_PACKAGE = "transformer_engine.pytorch"

TE_WORKSPACE_BYTES = 32 * 1024**2 + 1024
"""``get_cublas_workspace_size_bytes`` on compute capability 9.0 and later (``cpp_extensions/gemm.py``)."""
TE_USER_BUFFER_STREAMS = 3
"""Parts of the one workspace of products with user buffers (``_NUM_MAX_UB_STREAMS``, ``cpp_extensions/gemm.py``)."""
TE_GROUPED_GEMM_STREAMS = 4
"""Streams of a grouped matrix product, with a workspace each (``get_num_compute_streams``, ``module/base.py``)."""

Library = Literal["torch", "transformer_engine"]
LIBRARIES: tuple[Library, ...] = ("torch", "transformer_engine")

_simulated_workspaces: list[torch.Tensor] = []
_simulated_workspaces_of_biases: dict[Product, torch.Tensor] = {}
simulated_causal_masks: dict[int, torch.Tensor] = {}
"""What `memlab.engines.attention.unfused_attention` keeps as TE keeps its ``_default_causal_mask``, by length."""
simulated_unused_gradients: dict[tuple[Any, ...], torch.Tensor] = {}
"""What `memlab.engines.megatron.layers.weight_gradients` keeps as TE keeps its ``_dummy_wgrads``, by shape and type."""


def caches() -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Yields a name, a container with tensors, and a function that empties it."""
    gemm = sys.modules.get(f"{_PACKAGE}.cpp_extensions.gemm")
    if gemm is not None:
        workspace = gemm.get_cublas_workspace
        yield "Transformer Engine's cuBLAS workspaces", gc.get_referents(workspace), workspace.cache_clear
    base = sys.modules.get(f"{_PACKAGE}.module.base")
    if base is not None:
        yield "Transformer Engine's unused gradients", base._dummy_wgrads, base._dummy_wgrads.clear
    attention = sys.modules.get(f"{_PACKAGE}.attention.dot_product_attention.utils")
    if attention is not None:
        yield "Transformer Engine's sequence lengths", attention._cu_seqlens_cache, attention._cu_seqlens_cache.clear
    ring = sys.modules.get(f"{_PACKAGE}.attention.dot_product_attention.context_parallel")
    if ring is not None:
        lengths = ring._cu_seqlens_info_with_cp_cache
        yield "Transformer Engine's sequence lengths under context parallelism", lengths, lengths.clear
    softmax = sys.modules.get(f"{_PACKAGE}.attention.dot_product_attention.softmax")
    if softmax is not None:
        yield "Transformer Engine's causal masks", softmax._default_causal_mask, softmax._default_causal_mask.clear
    quantization = sys.modules.get(f"{_PACKAGE}.quantization")
    if quantization is not None:
        manager = quantization.FP8GlobalStateManager
        state = getattr(manager, "quantization_state", manager)  # an object since 2.15
        buffers = [state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer]
        yield "Transformer Engine's FP8 scales and maxima", buffers, manager.reset
    simulated: dict[str, Any] = {
        "causal masks": simulated_causal_masks,
        "unused gradients": simulated_unused_gradients,
        "cuBLAS workspaces": _simulated_workspaces,
        "cuBLASLt workspaces": _simulated_workspaces_of_biases,
    }
    yield from ((f"simulated {name}", held, held.clear) for name, held in simulated.items() if held)


def forget_fake_workspaces() -> None:
    """Frees what `hold_fake_workspaces` and `hold_workspaces_of_biases` hold."""
    _simulated_workspaces.clear()
    _simulated_workspaces_of_biases.clear()


def forget_causal_masks() -> None:
    """Frees the masks of unfused attention, which the other attention backends do not read."""
    _empty("causal masks")


def forget_unused_gradients() -> None:
    """Frees the gradients of weights that nobody reads, which the next step with fused accumulation makes again."""
    _empty("unused gradients")


def _empty(kind: str) -> None:
    for name, _, empty in list(caches()):
        if name.endswith(kind):
            empty()


def tensors() -> Iterator[torch.Tensor]:
    """Yields the tensors of all caches."""
    for _, container, _ in caches():
        yield from tensors_in(container)


def tensors_in(container: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a container, and in the containers in it."""
    if isinstance(container, torch.Tensor):
        yield container
    elif isinstance(container, dict):
        yield from tensors_in(list(container.values()))
    elif isinstance(container, (list, tuple)):
        for value in container:
            yield from tensors_in(value)


def fill_cublas_workspaces() -> None:
    """Makes cuBLAS allocate its workspaces on this thread and on autograd's: they belong to no tensor."""
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.ones(64, 64, dtype=dtype, device="cuda", requires_grad=True)
        torch.mm(weight, weight).sum().backward()


def hold_fake_workspaces(
    *,
    cublas: bool = True,
    linears: bool = True,
    grouped: bool = False,
    gates_beside: bool = False,
    overlapped: bool = False,
    before: Collection[Library] = (),
) -> None:
    """Holds on a simulated GPU what cuBLAS and Transformer Engine allocate on a Hopper GPU at their first products.

    Transformer Engine has one workspace for all linears (``get_cublas_workspace``, ``cpp_extensions/gemm.py``, 2.12.0
    and 2.16.1), torch one for each thread and stream. So stacks of what an H200 had allocated said, too.

    Args:
        cublas: Whether torch itself multiplies matrices (`multiplies_with_torch`).
        linears: Whether the model has linears of Transformer Engine.
        gates_beside: Whether torch multiplies gates of shared experts on a stream of its own. Measured on an H200
            (torch 2.11): four workspaces more. It is not known of which calls.
        overlapped: Whether products have user buffers; those that have none have their own workspace all the same.
        before: Libraries that have multiplied before the model's first step, so that theirs are allocated now.
    """
    of_torch = [CUBLAS_WORKSPACE_BYTES] * (cublas + 2 * gates_beside)
    of_linears = [TE_WORKSPACE_BYTES] * linears + [TE_WORKSPACE_BYTES * TE_USER_BUFFER_STREAMS] * overlapped
    of_grouped = [TE_WORKSPACE_BYTES] * TE_GROUPED_GEMM_STREAMS * grouped
    waiting: list[tuple[Library, Product, list[int]]] = [
        ("torch", "forward", of_torch),
        ("torch", "backward", of_torch),
        ("transformer_engine", "linear", of_linears),
        ("transformer_engine", "grouped linear", of_grouped),
    ]
    device = torch.cuda.current_device()
    for library, product, sizes in waiting:
        with allocated_at_first(None if library in before else product):
            _simulated_workspaces.extend(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)


def hold_workspaces_of_biases(**is_called: bool) -> None:
    """Holds on a simulated GPU what cuBLASLt has for torch's products with a bias, and frees what it does not have.

    Args:
        is_called: Whether there are such products, on the threads of ``forward`` and of ``backward``.
    """
    for thread, is_one in is_called.items():
        product: Any = f"{thread} with bias"
        if not is_one:
            _simulated_workspaces_of_biases.pop(product, None)
        elif product not in _simulated_workspaces_of_biases:
            with allocated_at_first(product), keeping("workspace"):
                workspace = torch.empty(CUBLASLT_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.cuda.current_device())
            _simulated_workspaces_of_biases[product] = workspace


def clear_torch_caches() -> None:
    """Frees cuBLAS's workspaces."""
    if torch.version.cuda is not None and torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
