"""Recipes of NeMo Automodel that train on images, with a vision tower whose class is transformers' own.

``recipes/vlm/finetune.py`` and ``apply_parameter_freezing`` in components/utils/model_utils.py (36044ad3). How many
images a sample has is the data's; only a mock dataset says it.
"""

from __future__ import annotations

from memlab.config.architectures import plain_name
from memlab.config.vision import VISION_TOWERS, VisionTower
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.fsdp2 import block
from memlab.jobs.frameworks.keys import COUNT

RECIPE = "FinetuneRecipeForVLM"
CLASS = "NeMoAutoModelForImageTextToText"
IMAGES = "dataset.num_images_per_sample"
_PIXELS = "processor.max_pixels"
_PACKED = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")
_ATTENTION, _FREEZE = "model.attn_implementation", "freeze_config.freeze_vision_tower"
_BY_MODEL = {published: name for name, tower in VISION_TOWERS.items() for published in tower.published}


def has_tower(reading: Reading) -> bool:
    """Whether the model is one of memlab's with a tower, built as a whole."""
    is_whole = CLASS in str(reading.get("model._target_", default=""))
    return is_whole and plain_name(str(reading.values.get("architecture"))) in _BY_MODEL


def take_tower(reading: Reading) -> None:
    """Takes the tower beside the language model, whether it is trained, and its attention; asks for the images."""
    values = reading.values
    name = _BY_MODEL[plain_name(str(values["architecture"]))]
    values |= {"architecture": VISION_TOWERS[name].language_model, "vision_tower": name}
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
    if VISION_TOWERS[name].patches_of_image is None:
        _take_patches(reading, VISION_TOWERS[name])
    if values.get("images_per_sequence") is None:
        values["images_per_sequence"] = 1  # of a job that is not built
        reading.questions.append(
            f"the number of images in each sample: it is the data's, and not in the file: give --set {IMAGES}=NUMBER, "
            "that of the samples with the most"
        )


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
        return
    reading.values["patches_per_image"] = tower.patches_of_token  # of a job that is not built
    reading.questions.append(
        f"the size of images: it is the data's, and not in the file: give --set {_PIXELS}=NUMBER, that of the largest"
    )


def drop_images(reading: Reading) -> None:
    """Moves the number of images of a model without a tower to what has no effect."""
    reading.values.pop("images_per_sequence", None)
    for one in [one for one in reading.taken if one.field == "images_per_sequence"]:
        reading.taken.remove(one)
        reading.without_effect[one.key] = "memlab has no vision tower of this model"
