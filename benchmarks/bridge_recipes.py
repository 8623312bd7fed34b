"""Writes the values of Megatron-Bridge's recipes that memlab knows without the package, from the named version.

``python -m benchmarks.bridge_recipes`` downloads the package, follows its recipe functions as `memlab job` does, and
writes ``memlab/jobs/frameworks/bridge_recipes.json``: the recipes of the models that memlab knows, without performance
recipes, with the keys that its tables have. ``--check`` compares instead, and exits with 1 if something differs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.framework_defaults import packages_in
from memlab.config.architectures import published_architecture
from memlab.config.training_state import RING_EXCHANGES
from memlab.jobs.bridge_package import BridgePackage
from memlab.jobs.entries import Entry
from memlab.jobs.frameworks.bridge import BRIDGE
from memlab.jobs.frameworks.bridge_recipes import VERSION, WRITTEN
from memlab.jobs.frameworks.keys import ABSENT
from memlab.jobs.frameworks.user_buffers import CONFIG
from memlab.jobs.python.values import NotFollowedError

_READ = BRIDGE.names() | {"model.sequence_parallel", "tokenizer.tokenizer_type", "tokenizer.tokenizer_model"}
_READ |= {"checkpoint.ckpt_format", "tokenizer.vocab_size", "tokenizer.use_tokenizer_vocab_size"}
_READ |= {"dataset.enable_offline_packing"}
_READ |= {"dataset.offline_packing_specs.packed_sequence_size", "dataset.packed_sequence_specs.packed_sequence_size"}
_READ |= {f"comm_overlap.{key}" for key in ("overlap_grad_reduce", "overlap_param_gather", "bucket_size")}
_READ |= {f"comm_overlap.{CONFIG}.{name}.{of}" for name in RING_EXCHANGES for of in ("method", "fp8_buf")}
_READ |= {f"comm_overlap.{CONFIG}.{name}_dgrad.method" for name in ("qkv", "fc1")}


_DEFAULT_OF_THE_MODEL = tuple(
    f"model.{key}" for key in ("moe_shared_expert_overlap", "cross_entropy_loss_fusion", "apply_rope_fusion")
)
"""Keys that have another default with some models, so a recipe that sets the table's says more than leaving it out."""
_USUAL = {"checkpoint.ckpt_format": "torch_dist"}
"""Values of keys that only rules read, which say no more than leaving the key out."""
_KEYS = {key.name: key for key in BRIDGE.keys if key.default is not ABSENT}
_MISSING = {row.name: row for row in BRIDGE.missing}


def recipes(root: Path) -> dict[str, dict[str, Any] | str]:
    """Returns what the recipes of models that memlab knows set; of an alias, the name of what it stands for."""
    package, found = BridgePackage(root), {}
    for name in package.names():
        recipe = package.find(name)
        try:
            values = {} if recipe is None else package.entries_of(recipe).by_key
        except NotFollowedError:
            continue
        model = values.get("model.hf_model_id")
        if recipe is not None and model is not None and published_architecture(str(model.value)) is not None:
            is_alias = recipe.name != name and package.find(recipe.name) == recipe
            found[name] = recipe.name if is_alias else {key: one.value for key, one in values.items() if _is_read(one)}
    return dict(sorted(found.items()))


def _is_read(one: Entry) -> bool:
    """Whether memlab reads a value that a recipe sets, and it says more than leaving the key out."""
    if one.value in (None, {}) or (one.key not in _READ and not one.key.startswith(("peft.", "env_vars."))):
        return False
    if one.key in _DEFAULT_OF_THE_MODEL:
        return True
    if one.key in _USUAL:
        return bool(one.value != _USUAL[one.key])
    if one.key in _MISSING and (one.key not in _KEYS or _MISSING[one.key].is_on(one.value)):
        return _MISSING[one.key].is_on(one.value)
    return one.key not in _KEYS or _KEYS[one.key].conversion.read(one.value) != _KEYS[one.key].default


def main(arguments: list[str] | None = None) -> int:
    """Writes the file, or compares it; returns 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        (root,) = packages_in(Path(folder), (f"megatron-bridge=={VERSION}",))
        found = recipes(root)
    text = json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n"
    if given.check:
        differing = sorted(name for name in {*found, *WRITTEN} if found.get(name) != WRITTEN.get(name))
        print(f"megatron-bridge {VERSION}: {len(found)} recipes, {len(differing)} differ", *differing, sep="\n  ")
        return 1 if differing else 0
    (Path(__file__).parents[1] / "memlab/jobs/frameworks/bridge_recipes.json").write_text(text)
    print(f"megatron-bridge {VERSION}: {len(found)} recipes, {len(text):,} characters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
