"""Models with a vision tower in the jobs of FSDP2's frameworks: whose class is transformers' own, with which images.

How many images a sample has, and of how many patches, is the data's. Where no key of a framework says it, memlab asks
for it by its own options' names.
"""

from __future__ import annotations

from memlab.config.architectures import plain_name
from memlab.config.vision import VISION_TOWERS, VisionTower
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.keys import COUNT, Key

IMAGES, PATCHES = "images_per_sequence", "patches_per_image"
OF_IMAGES = (Key(IMAGES, IMAGES, COUNT), Key(PATCHES, PATCHES, COUNT))
"""memlab's own keys, for frameworks that have none."""
_BY_MODEL = {published: name for name, tower in VISION_TOWERS.items() for published in tower.published}


def is_of_tower(reading: Reading) -> bool:
    """Whether the model is one of memlab's with a tower."""
    return plain_name(str(reading.values.get("architecture"))) in _BY_MODEL


def put_tower(reading: Reading) -> VisionTower:
    """Takes the language model and the tower in the place of the whole model, and returns the tower."""
    name = _BY_MODEL[plain_name(str(reading.values["architecture"]))]
    tower = VISION_TOWERS[name]
    reading.values |= {"architecture": tower.language_model, "vision_tower": name}
    return tower


def ask_for_images(reading: Reading, key: str = IMAGES) -> None:
    """Asks for the number of images, unless a key gave it."""
    if reading.values.get("images_per_sequence") is None:
        reading.values["images_per_sequence"] = 1  # of a job that is not built
        reading.questions.append(
            f"the number of images in each sample: it is the data's, and not in the file: give --set {key}=NUMBER, "
            "that of the samples with the most"
        )


def ask_for_size(reading: Reading, tower: VisionTower, key: str = PATCHES) -> None:
    """Asks for the size of images, unless a key gave it, or the tower scales each image to one size."""
    if tower.patches_of_image is None and reading.values.get("patches_per_image") is None:
        reading.values["patches_per_image"] = tower.patches_of_token  # of a job that is not built
        what = "pixels" if key != PATCHES else "patches"
        reading.questions.append(
            f"the size of images: it is the data's, and not in the file: give --set {key}=NUMBER, the {what} of the "
            "largest"
        )


def drop_images(reading: Reading) -> None:
    """Moves what is said of the images of a model without a tower to what has no effect."""
    for field in (IMAGES, PATCHES):
        reading.values.pop(field, None)
        reading.take_back(field, "memlab has no vision tower of this model")
