"""The attention that transformers calls where there is no GPU: what torch's kernels and flash-attn's save and allocate.

transformers finds each function under its name, and makes its masks between the embedding and the first layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from memlab.config.scenario import Scenario
from memlab.engines.attention.flash_attention import flash_attention_of_torch, packed_flash_attention_of_views
from memlab.engines.attention.kernel import new_random_state
from memlab.engines.attention.packed_sequences import ends_of
from memlab.engines.attention.workspace import bytes_of_workspace
from memlab.engines.fsdp2 import ulysses
from memlab.engines.fsdp2.context_parallel import attend_over_ranks
from memlab.engines.fsdp2.selective_checkpoint import as_one_operation
from memlab.engines.fsdp2.vision import language_model_of, seen_with_images
from memlab.meter.labels import one_kernel
from memlab.upstream.patching import patched

_PREFIX = "memlab_"
_UNFUSED = "sdpa_unfused"
_NOT_KEPT = partial(as_one_operation, is_kept=False)
"""A selective checkpoint knows torch's operations, and not those of the package flash-attn."""


def register() -> None:
    """Tells transformers the functions."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    # Classes of NeMo Automodel attend themselves where it is Transformer Engine's.
    kinds = {"sdpa": _sdpa, _UNFUSED: _unfused, "flash_attention_2": _flash, "eager": _eager, "te": _eager}
    for name, function in kinds.items():
        AttentionInterface.register(_PREFIX + name.replace("flash", "f"), function)  # it would look for a package
    masks: dict[str, Any] = {"sdpa": sdpa_mask, _UNFUSED: sdpa_mask, "eager": eager_mask}
    for name, make_mask in masks.items():
        AttentionMaskInterface.register(_PREFIX + name, make_mask)


def name_of(scenario: Scenario, *, on_gpu: bool, has_allocator: bool) -> str:
    """Returns the attention that transformers is to call: on a GPU torch's own, which chooses its kernel itself."""
    name: str = scenario.attention_of_transformers
    model = scenario.architecture
    if on_gpu:
        return name
    is_grouped = model.num_query_groups < model.num_attention_heads
    if has_allocator and scenario.dtype == "fp32" and is_grouped and name == "sdpa":
        name = _UNFUSED
    return _PREFIX + name.replace("flash", "f")


def inputs_of(attention: str, scenario: Scenario) -> dict[str, Any]:
    """Returns what transformers' model takes beside tokens: where packed sequences begin."""
    lengths = scenario.sequence_lengths
    if lengths is None:
        return {}
    positions = torch.cat([torch.arange(length, device="cpu") for length in lengths]).unsqueeze(0)
    own = {"packed_lengths": lengths} if attention.startswith(_PREFIX) else {}
    return {"position_ids": positions.cuda(), **own}


_IS_PACKED: ContextVar[bool] = ContextVar("is_packed", default=False)
"""Whether the rows of the forward pass that runs have several sequences."""


@contextmanager
def telling_sequences() -> Iterator[None]:
    """Tells transformers for the block whether rows have several sequences, where their positions have no values."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    def found(positions: torch.Tensor) -> torch.Tensor | None:
        if not positions.is_meta:
            return find(positions)
        numbers = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        return numbers if _IS_PACKED.get() else None

    with patched({"transformers.masking_utils.find_packed_sequence_indices": found}):
        yield


def note_sequences(module: Any, attention: str) -> None:
    """Has transformers' model note what `telling_sequences` tells, and make masks of images without their values."""
    if attention.startswith(_PREFIX):
        noted = partial(_noted, attention.removeprefix(_PREFIX))
        # Gemma 3 makes its masks of what it knows of images, Qwen3-VL in its language model.
        model = module.model if module.config.model_type == "gemma3" else language_model_of(module)
        model.register_forward_pre_hook(noted, with_kwargs=True)


def _noted(name: str, model: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if (is_image := named.get("token_type_ids")) is not None:
        return inputs, named | {"attention_mask": _seen_with_images(model, is_image, name)}
    # The two chunks of a rank's tokens look like two sequences; NeMo Automodel's hook drops their mask.
    _IS_PACKED.set(named.get("packed_lengths") is not None or "context_parallel_group" in named)
    return inputs, named


def _seen_with_images(model: Any, is_image: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Returns the masks of both kinds of layers, each of which has several values for each row."""
    windows = {"full_attention": None, "sliding_attention": model.language_model.config.sliding_window}
    masks = {kind: seen_with_images(is_image, window) for kind, window in windows.items()}
    dtype = model.language_model.embed_tokens.weight.dtype
    return {kind: _bias(mask, dtype) for kind, mask in masks.items()} if name == "eager" else masks


def _bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    zero, least = (torch.full((), value, dtype=dtype, device=seen.device) for value in (0.0, torch.finfo(dtype).min))
    return torch.where(seen, zero, least)


def _sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attends as ``scaled_dot_product_attention`` does on an H200: with cuDNN's kernel, in fp32 with another one.

    Args:
        query: Shape [batch, heads, tokens, channels].
        key: The same, of as many or fewer heads.
        attention_mask: Of the keys that a query sees, bool [1, 1, tokens, tokens]; None if attention is causal.
        **options: ``scaling`` of the scores; the dropout is 0.
    """
    assert not options.get("dropout"), "attention without dropout"
    group = options.get("context_parallel_group")
    if group is not None:
        over_ranks = attend_over_ranks(query, key, value, options["scaling"], group)
        return over_ranks.transpose(1, 2).contiguous(), None
    if attention_mask is None:
        is_causal = options.get("is_causal") is not False  # a vision tower's is not
        # cuDNN's kernel saves what flash-attn's saves.
        allocate = None if query.dtype is torch.float32 else _workspace
        attend = partial(flash_attention_of_torch, run=as_one_operation, is_causal=is_causal, allocate=allocate)
        return attend(query, key, value, options["scaling"]), None
    # transformers copies the keys of each group of heads, since no kernel with a mask takes fewer (``repeat_kv``).
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeated(each, groups) for each in (key, value))
    output: torch.Tensor = _MaskedAttention.apply(
        query, key, value, _bias(attention_mask, query.dtype), options["scaling"]
    )
    return output.transpose(1, 2).contiguous(), None


def _workspace(query: torch.Tensor, key: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Returns what cuDNN's kernel allocates and frees in backward, from [batch, tokens, heads, channels].

    It is as large as where Transformer Engine calls it (torch 2.11, seen in the history of an H200's allocator).
    """
    del rows
    return [query.new_empty(bytes_of_workspace(query.shape, key.shape, key.shape), dtype=torch.uint8)]


def _repeated(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    if groups == 1:
        return tensor
    batch, heads, tokens, channels = tensor.shape
    copied = tensor.unsqueeze(2).expand(batch, heads, groups, tokens, channels)
    return copied.reshape(batch, heads * groups, tokens, channels)


class _MaskedAttention(torch.autograd.Function):
    """cuDNN's kernel, which torch 2.11 takes on an H200 where there is a mask; its output lies as the query does.

    The caller's mask of bits becomes a tensor of the query's type in each layer (``convert_boolean_attn_mask_cudnn`` in
    aten/src/ATen/native/transformers/attention.cpp, torch 2.11 and 2.13), which the layer keeps. On other GPUs it is
    the memory-efficient kernel, which rounds the rows of the log-sum-exp up to 32, and whose output begins with tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
    ) -> torch.Tensor:
        def compute() -> tuple[torch.Tensor, ...]:
            output = torch.empty_like(query)
            with one_kernel():
                output.copy_(_attend(query, key, value, bias, scale))
            log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
            return output, log_sums, new_random_state(query)

        output, *others = as_one_operation(compute)
        ctx.save_for_backward(query, key, value, bias, output, *others)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, bias, output, *_ = ctx.saved_tensors
        results = tuple(torch.empty_like(each) for each in (query, key, value))
        workspace = _workspace(query.transpose(1, 2), key.transpose(1, 2), query.shape[2])
        with one_kernel(), torch.enable_grad():
            one, two, three = leaves = tuple(each.detach().requires_grad_() for each in (query, key, value))
            parts = torch.autograd.grad(_attend(one, two, three, bias, ctx.scale), leaves, grads[0])
            for result, part in zip(results, parts, strict=True):
                result.copy_(part)
            del leaves, parts, one, two, three, result, part
        del workspace, output
        return *results, None, None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float) -> Any:
    scores = query.float() @ key.float().transpose(2, 3) * scale + bias.float()
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def _flash(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attends as transformers has the package flash-attn 2 attend, which gets views, and copies none.

    The arguments are those of `_sdpa`; ``packed_lengths`` says that the row has several sequences.
    """
    assert attention_mask is None and not options.get("dropout"), "causal attention without dropout"
    lengths, group = options.get("packed_lengths"), options.get("context_parallel_group")
    if group is not None:
        return _flash_over_ranks(query, key, value, lengths, group, options), None
    if lengths is None:
        return flash_attention_of_torch(query, key, value, options["scaling"], _NOT_KEPT), None
    query, key, value = (each.transpose(1, 2).reshape(-1, each.shape[1], each.shape[3]) for each in (query, key, value))
    output = packed_flash_attention_of_views(query, key, value, options["scaling"], ends_of(lengths), _NOT_KEPT)
    return output.unsqueeze(0), None


def _flash_over_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any, group: Any, options: dict[str, Any]
) -> torch.Tensor:
    """Attends to whole rows with a share of the heads; shapes are [batch, heads, own tokens, channels]."""
    own = tuple(each.transpose(1, 2) for each in (query, key, value))
    query, key, value = ulysses.whole_rows(own, group)
    positions = ulysses.gathered_positions(options["position_ids"], group)
    if lengths is None:
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        output = flash_attention_of_torch(query, key, value, options["scaling"], _NOT_KEPT)
    else:
        query, key, value = (each.reshape(-1, *each.shape[2:]) for each in (query, key, value))
        packed = packed_flash_attention_of_views(query, key, value, options["scaling"], ends_of(lengths), _NOT_KEPT)
        output = packed.unsqueeze(0)
    del positions
    return ulysses.own_tokens(output, group)


def _eager(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """Attends with transformers' own function of the model's family."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    output, probabilities = attend(module, query, key, value, attention_mask, **options)
    if probabilities.grad_fn is not None:
        _hold_temporary_of_softmax(_softmax_of(probabilities.grad_fn))
    return output, probabilities


def _softmax_of(backward: Any) -> Any:
    """Returns the softmax in front of what makes probabilities of it, conversions to other types."""
    while "Softmax" not in backward.name():
        ((backward, _),) = backward.next_functions
    return backward


def _unfused(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attends as ``scaled_dot_product_attention`` does on a GPU in fp32 with fewer heads of keys than of queries.

    Of its kernels, those that take fp32 do not take fewer heads, so that it multiplies and keeps whole matrices of
    scores (``_scaled_dot_product_attention_math`` in aten/src/ATen/native/transformers/attention.cpp; torch 2.11,
    request by request as an H200's). The arguments are those of `_sdpa`.
    """
    assert attention_mask is None and not options.get("dropout"), "causal attention without dropout"
    return _multiplied(query, key, value, options["scaling"]).transpose(1, 2).contiguous(), None


def _multiplied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    root, groups, tokens = scale**0.5, query.shape[1] // key.shape[1], query.shape[2]
    query = query * root
    bias = torch.where(torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril(), 0.0, -torch.inf)
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ (key.transpose(2, 3) * root)
    scores += bias  # torch's own code copies them where a meter looks on
    probabilities = scores.softmax(-1)
    torch.isneginf(scores)  # whether a row sees no key (``_safe_softmax``)
    del scores
    if probabilities.grad_fn is not None:
        _hold_temporary_of_softmax(probabilities.grad_fn)
    return probabilities @ value


def _hold_temporary_of_softmax(backward: Any) -> None:
    """Holds a tensor while a softmax's backward runs: CUDA's multiplies gradient and output into one of its own.

    Nothing of it is seen on fake tensors (``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu).
    """
    held: list[torch.Tensor] = []
    backward.register_prehook(lambda gradients: held.append(torch.empty_like(gradients[0])))
    backward.register_hook(lambda *_: held.clear())
