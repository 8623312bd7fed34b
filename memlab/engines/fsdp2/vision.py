"""Models of transformers with a vision tower: built, frozen, sharded and given images as NeMo Automodel does it.

Automodel (36044ad3) calls the model with what the processor makes of texts and images (``recipes/vlm/finetune.py``),
freezes towers by the names of modules (``apply_parameter_freezing`` in components/utils/model_utils.py), and shards the
layers of a tower that is trained as it shards the others; what is frozen stays with the parameters outside the layers
(``apply_fsdp2_sharding_recursively``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memlab.config.scenario import Scenario
from memlab.config.vision import VisionTower


def build_with_tower(tower: VisionTower, text: Any, dtype: torch.dtype, attention: str) -> Any:
    """Returns transformers' model with its tower.

    Args:
        tower: Which one.
        text: transformers' config of the language model.
        dtype: Of the parameters.
        attention: A name of transformers' attention functions.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(
        tower.model_type,
        text_config=text.to_dict(),
        vision_config=dict(tower.config),
        image_token_id=text.vocab_size - 1,
        tie_word_embeddings=text.tie_word_embeddings,
        **tower.others,
    )
    return AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=attention)


def language_model_of(module: Any) -> Any:
    """Returns the part of transformers' model that has embedding, layers and last norm."""
    return getattr(module.model, "language_model", module.model)


def freeze(module: Any) -> None:
    """Freezes the tower, and not the projector behind it."""
    module.model.vision_tower.requires_grad_(requires_grad=False)


def trained_layers(module: Any) -> list[Any]:
    """Returns the layers of a tower that is trained."""
    tower = getattr(module.model, "vision_tower", None)
    layers = [] if tower is None else list(tower.encoder.layers)
    return [layer for layer in layers if next(layer.parameters()).requires_grad]


def inputs_with_images(scenario: Scenario, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns what the processor makes of texts and images, on the device: each row begins with its images.

    Args:
        scenario: With a tower.
        tokens: int64 [batch, sequence] on the host.
    """
    tower, images = scenario.vision_tower, scenario.state.images_per_sequence
    assert tower is not None and images is not None, "the scenario's own rule"
    places = images * tower.tokens_of_image
    is_image = torch.zeros(tokens.shape, dtype=torch.int64, device="cpu")
    is_image[:, :places] = 1
    tokens = tokens.clone()
    tokens[:, :places] = scenario.architecture.vocab_size - 1
    size = (len(tokens) * images, 3, tower.image_size, tower.image_size)
    generator = torch.Generator().manual_seed(scenario.seed)
    pixels = torch.rand(size, device="cpu", generator=generator).to(torch.bfloat16)
    attended = torch.ones(tokens.shape, dtype=torch.int64, device="cpu")
    found = {"input_ids": tokens, "attention_mask": attended, "token_type_ids": is_image, "pixel_values": pixels}
    return {name: each.cuda() for name, each in found.items()}


def seen_with_images(is_image: torch.Tensor, window: int | None) -> torch.Tensor:
    """Returns a mask bool [batch, 1, tokens, tokens] of the keys that a query sees: of its own image all.

    Args:
        is_image: int64 [batch, tokens], 1 where an image is; images that follow each other are one block.
        window: Tokens that a query sees at most; None for all.
    """
    places = torch.arange(is_image.shape[1], device=is_image.device)
    chosen = is_image == 1
    own = chosen.unsqueeze(2) & chosen.unsqueeze(1)
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
