"""Recipes of NeMo Automodel that train on images, with a vision tower whose class is transformers' own.

``recipes/vlm/finetune.py`` and ``apply_parameter_freezing`` in components/utils/model_utils.py (36044ad3). Of the
number of images in a sample, only a mock dataset says it.
"""

from __future__ import annotations

from memlab.config.vision import VisionTower
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.fsdp2 import block
from memlab.jobs.frameworks.keys import COUNT
from memlab.jobs.frameworks.towers import ask_for_images, ask_for_size, is_of_tower, put_tower

RECIPE = "FinetuneRecipeForVLM"
CLASS = "NeMoAutoModelForImageTextToText"
IMAGES = "dataset.num_images_per_sample"
_PIXELS = "processor.max_pixels"
_PACKED = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")
_ATTENTION, _FREEZE = "model.attn_implementation", "freeze_config.freeze_vision_tower"


def has_tower(reading: Reading) -> bool:
    """Whether the model is one of memlab's with a tower, built as a whole."""
    return CLASS in str(reading.get("model._target_", default="")) and is_of_tower(reading)


def take_tower(reading: Reading) -> None:
    """Takes the tower beside the language model, whether it is trained, and its attention; asks for the images."""
    tower, values = put_tower(reading), reading.values
    has_section = any(key.startswith("freeze_config.") for key in reading.entries.by_key)
    has_adapters = any(key.startswith("peft.") for key in reading.entries.by_key)
    reading.take(_FREEZE, "freeze_vision_tower", has_adapters or bool(reading.get(_FREEZE, default=has_section)))
    if (own := reading.get(_ATTENTION)) == "eager":
        reading.take(_ATTENTION, "attn_implementation", own)
    reading.not_modelled = [one for one in reading.not_modelled if one.key not in (_FREEZE, _ATTENTION)]
    if own not in (None, "sdpa", "eager"):
        reading.miss(_ATTENTION, "either", f"memlab predicts torch's attention (sdpa), not {own}")
    values["is_of_transformers"] = True
    if (values.get("packed_tokens") or 0) > 0:
        packed = next(key for key in _PACKED if reading.get(key))
        block(reading, packed, "rows of packed samples with images")
    if tower.patches_of_image is None:
        _take_patches(reading, tower)
    ask_for_images(reading, IMAGES)


def _take_patches(reading: Reading, tower: VisionTower) -> None:
    """Takes the most patches that the processor makes of an image, which it scales to so many pixels at most."""
    pixels = reading.converted(_PIXELS, COUNT)
    if pixels is not None:
        patches = pixels // tower.patch_size**2
        reading.take(_PIXELS, "patches_per_image", patches // tower.patches_of_token * tower.patches_of_token)
        reading.warnings.append(
            f"images have at most {reading.values['patches_per_image']} patches, by {_PIXELS}, and memlab takes images "
            f"that large: give --set {_PIXELS}=NUMBER for smaller ones"
        )
    ask_for_size(reading, tower, _PIXELS)
