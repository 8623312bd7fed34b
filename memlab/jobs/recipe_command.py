"""The command of Megatron-Bridge's ``run_recipe.py``: the name of a recipe, short options, and overrides.

Names: ``scripts/training/run_recipe.py`` (August 2026).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from memlab.jobs.bridge_package import package_around
from memlab.jobs.entries import Entries, parse_scalar
from memlab.jobs.frameworks.bridge_recipes import RECIPES, VERSION
from memlab.jobs.python.values import NotFollowedError

_SIZES = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "vp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "gb": "train.global_batch_size",
    "mb": "train.micro_batch_size",
    "sl": "dataset.seq_length",
}
_OPTIONS = {f"-{short}": key for short, key in _SIZES.items()} | {
    f"--{key.rpartition('.')[2]}": key for key in _SIZES.values()
}
_ADAPTERS = ("lora", "dora")
"""Modes that train adapters alone, which the names of their recipes call ``peft``."""
_SELECTION = ("--recipe", "--model", "--mode")
_PROGRAM = "run_recipe.py"
_SWITCHES = ("--deterministic", "--dry-run", "--dry_run", "--dump-env", "--dump_env", "--packed_sequence")


def read_recipe(words: list[tuple[str, int]], path: Path, entries: Entries) -> None:
    """Adds the values of the recipe that a command names, and over them what its options say.

    A model and a mode stand for the recipe ``MODEL_MODE_config``. An option that stands for no key is a key itself.

    Args:
        path: The script's file; the recipes of the checkout that it belongs to come before those that are installed.
    """
    given: dict[str, tuple[str, int]] = {}
    starts = [index for index, (word, _) in enumerate(words) if word.rpartition("/")[2] == _PROGRAM]
    for (word, line), (value, _) in pairwise([*words[starts[-1] + 1 if starts else 0 :], ("", 0)]):
        option, equals, own = word.partition("=")
        if option in _OPTIONS or option in _SELECTION:
            given[option] = (own if equals else value, line)
        elif starts and option.startswith("-"):
            name = option.lstrip("-").replace("-", "_")
            entries.add(name, True if option in _SWITCHES else parse_scalar(own if equals else value), line)
    if "--model" in given and "--recipe" not in given:
        model, line = given["--model"]
        mode = given.get("--mode", ("pretrain", line))[0]
        given["--recipe"] = (f"{model}_{'peft' if mode in _ADAPTERS else mode}_config", line)
    if "--recipe" in given:
        name, line = given["--recipe"]
        _take_recipe(name, line, path, entries)
        mode = given.get("--mode", ("lora" if "_peft_" in name else "", line))[0]
        if mode in _ADAPTERS:
            entries.add("peft", mode, line)
    for option, (value, line) in given.items():
        if option in _OPTIONS:
            entries.add(_OPTIONS[option], parse_scalar(value), line)


def take_recipe_of_file(path: Path, entries: Entries) -> None:
    """Takes the values of the recipe that a file names as ``recipe: {_target_: ...}``, below those of the file."""
    target = entries.by_key.pop("recipe._target_", None)
    if target is None or target.line is None:
        return
    own = Entries()
    _take_recipe(str(target.value).rpartition(".")[2], target.line, path, own)
    entries.by_key = own.by_key | entries.by_key
    entries.recipe = own.recipe
    entries.warnings += own.warnings


def _take_recipe(name: str, line: int, path: Path, entries: Entries) -> None:
    """Adds the values of a recipe, from the package where there is one, else as memlab has them of one version."""
    package = package_around(path)
    recipe = None if package is None else package.find(name)
    if package is not None and recipe is not None:
        try:
            for key, entry in package.entries_of(recipe).by_key.items():
                entries.by_key.setdefault(key, entry) if key == "world_size" else entries.by_key.update({key: entry})
            entries.recipe = str(package.file_of(recipe))
        except NotFollowedError as error:
            entries.warnings.append(f"the recipe {name} cannot be read without running it: {error}")
    elif name in RECIPES:
        for key, value in RECIPES[name].items():
            entries.add(key, value, line)
        entries.recipe = f"Megatron-Bridge {VERSION}"
    entries.add("recipe", name, line)
