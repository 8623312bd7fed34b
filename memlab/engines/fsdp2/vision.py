"""Models of transformers with a vision tower: built, frozen, sharded and given images as NeMo Automodel does it.

Automodel (36044ad3) calls the model with what the processor makes of texts and images (``recipes/vlm/finetune.py``),
freezes towers by the names of modules (``apply_parameter_freezing`` in components/utils/model_utils.py), and shards the
layers of a tower that is trained as it shards the others; what is frozen stays with the parameters outside the layers
(``apply_fsdp2_sharding_recursively``).
"""

from __future__ import annotations

from math import isqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from memlab.config.scenario import Scenario
from memlab.config.vision import VisionTower

COMPUTED_BY_MODEL = (
    *("position_ids", "image_position_ids", "image_interp_indices", "image_interp_weights"),
    "image_window_index",
)
"""What transformers computes of the sizes of images, and drops when forward ends, where a prediction has to give it."""


def build_with_tower(tower: VisionTower, text: Any, dtype: torch.dtype, attention: str) -> Any:
    """Returns transformers' model with its tower."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    of_text = text.to_dict()
    if tower.model_type == "qwen3_vl":
        sections = {"mrope_section": _sections(text.head_dim, 20), "mrope_interleaved": True}
        of_text |= {"model_type": "qwen3_vl_text", "rope_parameters": of_text["rope_parameters"] | sections}
    if tower.model_type == "qwen2_5_vl":
        sections = {"mrope_section": _sections(text.hidden_size // text.num_attention_heads, 24)}
        of_text |= {"model_type": "qwen2_5_vl_text", "rope_parameters": of_text["rope_parameters"] | sections}
    config = AutoConfig.for_model(
        tower.model_type,
        text_config=of_text,
        vision_config=dict(tower.config),
        image_token_id=text.vocab_size - 1,
        tie_word_embeddings=text.tie_word_embeddings,
        **tower.others,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=attention)
    if hasattr(model.model.language_model, "_deepstack_process"):
        model.model.language_model._deepstack_process = _Added.apply
    return model


def _sections(channels: int, of_128: int) -> list[int]:
    """Returns how many of a head's angles turn with a place in time, with a row, and with a column.

    Args:
        channels: Of a head.
        of_128: How many turn with a row in the published models, whose heads have 128 channels.
    """
    of_each = channels // 2 * of_128 // 64
    return [channels // 2 - 2 * of_each, of_each, of_each]


def language_model_of(module: Any) -> Any:
    """Returns the part of transformers' model that has embedding, layers and last norm."""
    return getattr(module.model, "language_model", module.model)


def freeze(module: Any) -> None:
    """Freezes the tower, and not a projector behind it."""
    _tower_of(module).requires_grad_(requires_grad=False)


def trained_lists(module: Any) -> list[list[Any]]:
    """Returns the lists of modules of a tower that is trained, its layers first: each module is a unit of FSDP2."""
    tower = _tower_of(module)
    if tower is None or not any(each.requires_grad for each in tower.parameters()):
        return []
    return [[*each] for each in tower.modules() if isinstance(each, torch.nn.ModuleList)]


def trained_layers(module: Any) -> list[Any]:
    """Returns the layers of a tower that is trained."""
    return [layer for layers in trained_lists(module)[:1] for layer in layers]


def _tower_of(module: Any) -> Any:
    return getattr(module.model, "vision_tower", getattr(module.model, "visual", None))


def inputs_with_images(scenario: Scenario, tokens: torch.Tensor) -> dict[str, Any]:
    """Returns what the processor makes of texts and images, on the device: each row begins with its images.

    Args:
        scenario: With a tower.
        tokens: int64 [batch, sequence] on the host.
    """
    tower, state = scenario.vision_tower, scenario.state
    assert tower is not None and state.images_per_sequence is not None, "the scenario's own rule"
    rows, of_image = len(tokens), tower.tokens_of_image(state.patches_per_image)
    is_image = torch.zeros(tokens.shape, dtype=torch.int64, device="cpu")
    for number in range(state.images_per_sequence):
        is_image[:, number * (of_image + 1) : (number + 1) * (of_image + 1) - 1] = 1
    tokens = tokens.masked_fill(is_image == 1, scenario.architecture.vocab_size - 1)
    images, generator = rows * state.images_per_sequence, torch.Generator().manual_seed(scenario.seed)
    if tower.patches_of_image is None:
        patches = state.patches_per_image or 0
        size: tuple[int, ...] = (images * patches, 3 * 2 * tower.patch_size**2)
        pixels = torch.rand(size, device="cpu", generator=generator)
        of_grid = _of_grid(tower, tokens, images, patches, is_image)
    else:
        side = tower.patch_size * isqrt(tower.patches_of_image)
        pixels = torch.rand((images, 3, side, side), device="cpu", generator=generator).to(torch.bfloat16)
        attended = torch.ones(tokens.shape, dtype=torch.int64, device="cpu")
        of_grid = {"attention_mask": attended, "token_type_ids": is_image}
    found = {"input_ids": tokens, "pixel_values": pixels} | of_grid
    return {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in found.items()}


def _of_grid(
    tower: VisionTower, tokens: torch.Tensor, images: int, patches: int, is_image: torch.Tensor
) -> dict[str, Any]:
    """Returns the sizes of images; where there are no values, also what follows from them."""
    sizes = [[1, *tower.grid_of(patches)]] * images
    if not tokens[:0].cuda().is_meta:
        grid = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        return {"image_grid_thw": grid, "mm_token_type_ids": is_image}
    places, all_patches = torch.zeros((3, *tokens.shape), dtype=torch.int64, device="cpu"), images * patches
    found = {
        "image_grid_thw": np.array(sizes),
        "mm_token_type_ids": is_image,
        "position_ids": places,
        "image_cu_seqlens": np.arange(images + 1) * patches,
        "image_position_ids": torch.zeros((all_patches, 2), dtype=torch.int64, device="cpu"),
    }
    if "window_size" in tower.config:
        return found | {
            "image_window_index": torch.zeros(all_patches // tower.patches_of_token, dtype=torch.int64, device="cpu"),
            "image_cu_window_seqlens": np.cumsum([0, *_windows_of(tower, patches) * images]),
        }
    return found | {
        "image_interp_indices": torch.zeros((all_patches, 4), dtype=torch.int64, device="cpu"),
        "image_interp_weights": torch.zeros((all_patches, 4), device="cpu"),
    }


def _windows_of(tower: VisionTower, patches: int) -> list[int]:
    """Returns the patches of each window of an image, row by row (``get_vision_window_index`` of transformers)."""
    side = tower.config["window_size"] // tower.patch_size
    rows, columns = ([min(side, size - first) for first in range(0, size, side)] for size in tower.grid_of(patches))
    return [row * column for row in rows for column in columns]


def seen_with_images(is_image: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns a mask bool [batch, 1, tokens, tokens] of the keys that a query sees: of its own image all.

    Args:
        is_image: int64 [batch, tokens], 1 where an image is.
        window: Tokens that a query sees at most; None for all.
    """
    places = torch.arange(is_image.shape[1], device=is_image.device)
    chosen = is_image == 1
    numbers = (1 - is_image).cumsum(1)  # the same for all tokens of an image
    own = chosen.unsqueeze(2) & chosen.unsqueeze(1) & (numbers.unsqueeze(2) == numbers.unsqueeze(1))
    seen = (places.unsqueeze(1) >= places) | own
    if window is not None:
        seen = seen & (places.unsqueeze(1) < places + window)
    return seen.unsqueeze(1)


class ImagesPlaced(TorchFunctionMode):
    """Puts images into the embedding of a sequence with the temporary tensors that torch has on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.masked_scatter:
            return _Placed.apply(*args)
        if func is torch.Tensor._is_all_true and args[0].is_meta:  # whether there are as many places as images need
            return SimpleNamespace(item=lambda: True)
        return func(*args, **(kwargs or {}))


class _Placed(torch.autograd.Function):
    """``masked_scatter``, whose backward asks a mask how many values it chooses, which fake tensors do not know.

    Its temporaries are those of ``masked_scatter_`` and ``masked_select`` in aten/src/ATen/native/cuda (torch 2.11):
    the mask of all values with a sum of 8 bytes for each, and three numbers for the place of each chosen one.
    """

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, mask: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = images.shape
        output = embedded.clone()
        chosen = mask.expand(embedded.shape).contiguous()
        places = torch.empty(embedded.shape, dtype=torch.int64, device=embedded.device)
        if not embedded.is_meta:
            output.masked_scatter_(chosen, images)
        del chosen, places
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        (mask,) = ctx.saved_tensors
        of_embedded = grads[0].masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return of_embedded, None, None
        of_images = grads[0].new_empty(ctx.shape)
        places = torch.empty((of_images.numel(), 3), dtype=torch.int64, device=of_images.device)
        if not of_images.is_meta:
            of_images.copy_(grads[0][mask.expand(grads[0].shape)].view(ctx.shape))
        del places
        return of_embedded, None, of_images


class _Added(torch.autograd.Function):
    """Adds what a layer of the tower has made to the places of images (``_deepstack_process`` of Qwen3-VL).

    transformers takes the rows by a mask and puts them back, with the temporary tensors of `torch.Tensor.index_put_`.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, mask: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = images.shape
        output = hidden.clone()
        rows = hidden.new_empty(images.shape)
        if not hidden.is_meta:
            rows.copy_(hidden[mask])
        rows_with_images = rows + images
        if not hidden.is_meta:
            output[mask] = rows_with_images
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        (mask,) = ctx.saved_tensors
        of_hidden, of_images = grads[0].clone(), grads[0].new_empty(ctx.shape)
        of_rows = torch.zeros_like(grads[0])
        if not of_images.is_meta:
            of_images.copy_(grads[0][mask])
        del of_rows
        return of_hidden, None, of_images if ctx.needs_input_grad[2] else None
