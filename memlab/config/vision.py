"""Vision towers that transformers' models have beside a language model: what is built, without torch.

Sizes are those of the published ``config.json``; the rest is transformers' own (``models/gemma3``, ``qwen2_5_vl`` and
``qwen3_vl``, 5.24). How many images a sequence has, and of how many patches, is the data's to say, so options ask for
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from types import MappingProxyType
from typing import Any, Literal, get_args

VisionTowerName = Literal[
    "gemma-3-4b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b", "qwen2.5-vl-3b", "qwen2.5-vl-7b", "gemma-3-tiny",
    "qwen3-vl-tiny", "qwen2.5-vl-tiny",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionTower:
    """A tower with the projector that brings its output to the width of a language model."""

    model_type: str
    """Of the whole model's ``config.json``."""
    published: tuple[str, ...] = ()
    """Names of whole models on Hugging Face, as `memlab.config.architectures.plain_name` has them."""
    language_model: str
    """The architecture beside which it is published."""
    width: int
    """Of that language model."""
    config: Mapping[str, Any]
    """The ``vision_config``."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Of the whole model's ``config.json``."""
    num_parameters: int
    """Of the module that ``freeze_vision_tower`` freezes."""
    num_parameters_of_projector: int = 0
    """Outside that module."""
    patches_of_image: int | None = None
    """Of models that scale each image to one size; None where the data decides."""
    patches_of_token: int = 4
    """How many patches become one token of the sequence."""

    def tokens_of_image(self, patches: int | None) -> int:
        """Returns how many tokens of the sequence an image with so many patches takes."""
        return (self.patches_of_image or patches or 0) // self.patches_of_token

    def grid_of(self, patches: int) -> tuple[int, int]:
        """Returns rows and columns of an image of so many patches, as near to a square as even numbers of both are."""
        rows = next(rows for rows in range(isqrt(patches), 0, -1) if not (rows % 2 or patches % (2 * rows)))
        return rows, patches // rows

    @property
    def patch_size(self) -> int:
        """Rows of pixels of a patch, and columns."""
        return int(self.config["patch_size"])


_SIGLIP = {"model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False, "attention_dropout": 0.0}
_QWEN2_5_VL = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_QWEN3_VL = {"num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2}


def _qwen(
    model_type: str, language_model: str, width: int, num_parameters: int, *published: str, **config: Any
) -> VisionTower:
    """Makes a tower of images of any size, from what its own ``vision_config`` has."""
    usual = _QWEN3_VL if model_type == "qwen3_vl" else _QWEN2_5_VL
    return VisionTower(
        model_type=model_type,
        published=published,
        language_model=language_model,
        width=width,
        config=usual | {"out_hidden_size": width} | config,
        num_parameters=num_parameters,
    )


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
            patches_of_image=4096,
            patches_of_token=16,
        ),
        # https://huggingface.co/Qwen/Qwen3-VL-4B-Instruct/blob/main/config.json, and likewise
        "qwen3-vl-2b": _qwen("qwen3_vl", "qwen3-1.7b", 2048, 406_957_056, "qwen3-vl-2b", depth=24, hidden_size=1024,
                             intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]),
        "qwen3-vl-4b": _qwen("qwen3_vl", "qwen3-4b", 2560, 415_347_712, "qwen3-vl-4b", depth=24, hidden_size=1024,
                             intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17]),
        "qwen3-vl-8b": _qwen("qwen3_vl", "qwen3-8b", 4096, 576_388_336, "qwen3-vl-8b", depth=27, hidden_size=1152,
                             intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24]),
        # https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/config.json, and likewise
        "qwen2.5-vl-3b": _qwen("qwen2_5_vl", "qwen2.5-3b", 2048, 668_684_288, "qwen2.5-vl-3b"),
        "qwen2.5-vl-7b": _qwen("qwen2_5_vl", "qwen2.5-7b", 3584, 676_550_144, "qwen2.5-vl-7b"),
        "gemma-3-tiny": VisionTower(
            model_type="gemma3",
            language_model="gemma-3-270m",
            width=640,
            config=_SIGLIP
            | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
            | {"image_size": 112},
            others={"mm_tokens_per_image": 16},
            num_parameters=142_336,
            num_parameters_of_projector=41_024,
            patches_of_image=64,
        ),
        "qwen3-vl-tiny": _qwen("qwen3_vl", "qwen3-dense-tiny", 128, 551_296, depth=3, hidden_size=64,
                               intermediate_size=128, num_heads=2, deepstack_visual_indexes=[0, 1], patch_size=4),
        "qwen2.5-vl-tiny": _qwen("qwen2_5_vl", "qwen2.5-tiny", 128, 229_888, depth=3, hidden_size=64,
                                 intermediate_size=128, num_heads=2, fullatt_block_indexes=[1], patch_size=4,
                                 window_size=16),
    }
)  # fmt: skip
assert get_args(VisionTowerName) == tuple(VISION_TOWERS), "each tower has a name that the option's row lists"
