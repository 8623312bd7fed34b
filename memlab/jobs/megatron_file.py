"""Megatron-LM's file of ``--yaml-cfg``, which it reads in place of all flags (``parse_args``, d98e8a64).

Its keys are the destinations of the flags; those of the layers and of the layout have a section each, and the names
that Megatron-Core's configs have.
"""

from __future__ import annotations

import re
from pathlib import Path

from memlab.jobs.entries import UNKNOWN, Entries
from memlab.jobs.yaml_tree import ReadFile, flat


def take_file_for_flags(_: object, entries: Entries, read: ReadFile) -> None:
    """Takes the file in place of the flags, apart from those of the ranks; as `Framework.take_files`."""
    named, flags = entries.by_key.get("yaml_cfg"), entries.by_key
    if named is None:
        return
    name = UNKNOWN if named.is_unknown else str(named.value)
    root = read(name, named.line or 1)
    if root is None:
        return
    own, file = Entries(), Path(name).name
    for key, entry in flat(root, file).by_key.items():
        if entry.value is not None:
            own.add(re.sub(r"^(language_model|model_parallel)[.]", "", key), entry.value, entry.line)
    _name_as_flags(own)
    kept = {key: flags[key] for key in ("nnodes", "nproc_per_node") if key in flags}
    dropped = [f"--{key.replace('_', '-')}" for key in flags if key not in kept and key != "yaml_cfg"]
    entries.by_key = own.of_file(file).by_key | kept
    entries.file_for_flags = file
    entries.warnings.append(
        f"{named.place}: with --yaml-cfg Megatron-LM reads {file} in place of all flags"
        + (f", so these change nothing: {', '.join(dropped)}" if dropped else "")
    )


def _name_as_flags(own: Entries) -> None:
    """Gives a file's keys the meaning that they have as flags, which Megatron-Core's configs do not ask.

    See ``validate_yaml`` and ``core_transformer_config_from_yaml`` in megatron/training/yaml_arguments.py (00caa53a).
    """
    keys = own.by_key
    if "num_moe_experts" in keys:
        own.add("num_experts", keys["num_moe_experts"].value, keys.pop("num_moe_experts").line)
    if "num_query_groups" in keys:
        own.add("group_query_attention", True, keys["num_query_groups"].line)
    elif "group_query_attention" in keys:
        own.add("group_query_attention", False, keys["group_query_attention"].line)
    activation = keys.get("activation_func")
    if activation is not None and activation.value in ("swiglu", "squaredrelu", "gelu"):
        del keys["activation_func"]
        own.add("swiglu", activation.value == "swiglu", activation.line)
        own.add("squared_relu", activation.value == "squaredrelu", activation.line)
        if activation.value == "gelu" and "bias_activation_fusion" in keys:
            own.add("bias_gelu_fusion", keys["bias_activation_fusion"].value, keys.pop("bias_activation_fusion").line)
    # The one follows from num_layers_per_virtual_pipeline_stage, the other is always on.
    for key in ("virtual_pipeline_model_parallel_size", "deallocate_pipeline_outputs"):
        keys.pop(key, None)
