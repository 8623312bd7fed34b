"""Vision towers that transformers' models have beside a language model: what is built, without torch.

Sizes are those of the published ``config.json``; the rest is transformers' own (``models/gemma3``, 5.24). How many
images a sequence has is the data's to say, so an option asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

VisionTowerName = Literal["gemma-3-4b", "gemma-3-tiny"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionTower:
    """A tower with the projector that brings its output to the width of a language model."""

    model_type: str
    """Of the whole model's ``config.json``."""
    published: tuple[str, ...]
    """Names of whole models on Hugging Face, without the owner's, in small letters."""
    language_model: str
    """The architecture beside which it is published."""
    width: int
    """Of that language model."""
    config: Mapping[str, Any]
    """The ``vision_config``."""
    others: Mapping[str, Any]
    """Of the whole model's ``config.json``."""
    num_parameters: int
    """Without those of the projector."""
    num_parameters_of_projector: int
    """Outside the module that ``freeze_vision_tower`` freezes."""
    image_size: int
    """Rows of pixels of an image, and columns."""
    tokens_of_image: int
    """What takes an image's place in the sequence."""


_SIGLIP = {"model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False, "attention_dropout": 0.0}
VISION_TOWERS: Mapping[str, VisionTower] = MappingProxyType(
    {
        # https://huggingface.co/google/gemma-3-4b-it/blob/main/config.json
        "gemma-3-4b": VisionTower(
            model_type="gemma3",
            published=("gemma-3-4b-it", "gemma-3-4b-pt"),
            language_model="gemma-3-4b-text",
            width=2560,
            config=_SIGLIP
            | {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
            | {"image_size": 896},
            others={"mm_tokens_per_image": 256},
            num_parameters=416_866_032,
            num_parameters_of_projector=2_950_272,
            image_size=896,
            tokens_of_image=256,
        ),
        "gemma-3-tiny": VisionTower(
            model_type="gemma3",
            published=(),
            language_model="gemma-3-270m",
            width=640,
            config=_SIGLIP
            | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
            | {"image_size": 112},
            others={"mm_tokens_per_image": 16},
            num_parameters=142_336,
            num_parameters_of_projector=41_024,
            image_size=112,
            tokens_of_image=16,
        ),
    }
)
assert get_args(VisionTowerName) == tuple(VISION_TOWERS), "each tower has a name that the option's row lists"
