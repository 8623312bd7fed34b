"""Published models whose layers memlab does not have, or not all of them: their fields, by name, each with its source.

``other_models.json`` has the models by the last part of their names, and the families: what memlab lacks of each, and
what Megatron-Bridge's provider of the family sets otherwise than Megatron-Core. A model with a ``language_model`` is
one of memlab's with towers of images or sound beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from memlab.config.architectures import ARCHITECTURES, Architecture, plain_name
from memlab.config.from_json import read_json
from memlab.config.hugging_face import model_name
from memlab.config.validation import is_whole_number, shortened

_FILE = Path(__file__).with_name("other_models.json")
_OF_ARCHITECTURE = [
    field.name for field in fields(Architecture) if field.name not in ("gated_linear_unit", "moe_layer_freq")
]
"""Fields of a model that a stand-in may have; memlab's experts have gates."""
_ONLY_LISTED = frozenset(("normalization", "position_embedding_type", "max_position_embeddings"))
"""Fields whose value may be one that memlab's layers do not have, or goes with such a one."""
_STANDING = frozenset(name for name in _OF_ARCHITECTURE if not name.startswith(("mamba_", "hybrid_"))) - _ONLY_LISTED
_IN_PLACE = {
    "dense": ("llama-3.1-8b", "qwen2.5-14b"),
    "experts": ("qwen3-30b-a3b", "qwen3-235b-a22b"),
    "latent attention": ("moonlight-16b-a3b", "deepseek-v3"),
}
"""Two models of each kind, for sizes that are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """What is known of a published model that memlab does not predict as a whole."""

    name: str
    family: str
    """The ``model_type`` of its config.json."""
    lacks: str
    """What of the model memlab does not have, in a phrase."""
    fields: dict[str, Any]
    """By Megatron's names; sizes that no source of `source` has are missing."""
    source: str
    language_model: str | None
    """The architecture of memlab that its language model is, where nothing but towers is missing."""
    provider: dict[str, Any]
    """Fields of the training state and layers that the provider of Megatron-Bridge sets."""
    text_provider: dict[str, Any] | None = None
    """The same of the provider of its language model alone; None where that sets what `provider` does."""
    fuses_no_rope: bool = False
    """Whether Megatron-Bridge switches the fused rotary embedding off, whatever the job says, or refuses it
    (``validate_rope_fusion_compatibility`` in utils/fusions.py and an assertion in
    models/qwen_vl/modelling_qwen3_vl/rope.py, 067f987d)."""
    frozen_by_bridge: bool = False
    """Whether Megatron-Bridge's provider freezes the language model where a job does not say otherwise."""

    def stand_ins(self) -> tuple[Architecture, Architecture]:
        """Returns two models that have its known sizes, and others for what is not known; they predict nothing."""
        known = {name: value for name, value in self.fields.items() if name in _STANDING}
        routes = "num_moe_experts" in known or ("hidden_size" not in known and "moe_router_dtype" in self.provider)
        known.pop("moe_latent_size", None)  # Megatron-Core's rules for it may not fit what a provider sets
        kind = "latent attention" if known.get("multi_latent_attention") else "experts" if routes else "dense"
        if known.get("moe_shared_expert_gate") or (routes and "moe_shared_expert_overlap" in self.provider):
            known.setdefault("moe_shared_expert_intermediate_size", 512)
        first, second = (ARCHITECTURES[self.language_model or name] for name in _IN_PLACE[kind])
        rest = {"name": self.name, "moe_layer_freq": None}
        return (
            replace(first, default_seq_length=1024, **(rest | known)),
            replace(second, default_seq_length=2048, **(rest | known)),
        )

    def provider_of(self, architecture: Architecture, *, is_text_alone: bool = False) -> dict[str, Any]:
        """Returns what the provider sets of the layers that a model in its place has.

        Args:
            architecture: In its place.
            is_text_alone: Whether the job builds the language model without its towers.
        """
        text = self.text_provider if is_text_alone else None
        provider = self.provider if text is None else text
        absent = () if architecture.routes else ("moe_",)
        if not architecture.moe_shared_expert_intermediate_size:
            absent = (*absent, "moe_shared_expert_")
        return {name: value for name, value in provider.items() if not name.startswith(absent)}

    def predicted(self) -> Architecture | None:
        """Returns its language model under the model's name; None where memlab lacks more than towers."""
        if self.language_model is None:
            return None
        return replace(ARCHITECTURES[self.language_model], name=self.name, **self.fields)

    def all_fields(self) -> dict[str, Any]:
        """Returns all fields that are known, those of its language model too."""
        model = self.predicted()
        if model is None:
            return self.fields
        return shown_fields(model)


SHOWN = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "share_embeddings_and_output_weights", "qk_layernorm", "add_qkv_bias", "rotary_base"),
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
)


def shown_fields(model: Architecture) -> dict[str, Any]:
    """Returns the sizes of a model that memlab has, and what its layers have; of what is off, whether it is tied."""
    tied = "share_embeddings_and_output_weights"
    return {
        name: getattr(model, name)
        for name in SHOWN
        if name == tied or getattr(model, name) not in (None, False, 0, 0.0)
    }


def other_model(name: str) -> OtherModel | None:
    """Returns what is known of a model that memlab lacks.

    Args:
        name: Its name, ``OWNER/NAME`` on Hugging Face, or the path of a folder of such a name.
    """
    return _models().get(plain_name(name))


def of_config(name: str, folder: Path) -> OtherModel | None:
    """Reads a Hugging Face ``config.json`` of a model that memlab lacks.

    Args:
        name: Of the model's folder, as a job has it.
        folder: That of the job; a relative path of the model's folder may start there.

    Returns:
        None where there is no such file, or where it is none of a model.
    """
    for path in (Path(name), folder / name):
        file = path / "config.json"
        try:
            config = read_json(file, "give a Hugging Face config.json") if file.is_file() else None
        except (OSError, ValueError):  # a folder that may not be entered, a damaged file: whoever builds it says so
            config = None
        if isinstance(config, dict) and isinstance(config.get("model_type"), str):
            break
    else:
        return None
    kind = config["model_type"]
    family = _data()["families"].get(kind, {})
    text = config.get("text_config")
    found = config | (text if isinstance(text, dict) else {})
    sizes = {
        ours: found[theirs] for theirs, ours in _IN_CONFIG.items() if is_whole_number(found.get(theirs), at_least=1)
    }
    sizes |= {"multi_latent_attention": True} if "kv_lora_rank" in sizes else {}
    tied = found.get("tie_word_embeddings")
    return OtherModel(
        name=model_name(str(file.parent)),
        family=kind,
        lacks=family.get("lacks", f"layers of the kind {shortened(kind)}"),
        fields=sizes | ({"share_embeddings_and_output_weights": tied} if isinstance(tied, bool) else {}),
        source=str(file),
        language_model=None,
        provider=family.get("provider", {}),
    )


def of_sizes(values: dict[str, Any], name: str) -> OtherModel:
    """Returns a model whose sizes the job's file gives.

    Args:
        values: Fields of `Architecture`, and others.
        name: What the model is called.
    """
    absent = () if values.get("num_moe_experts") else ("moe_",)
    if not values.get("multi_latent_attention"):
        absent = (*absent, "q_lora_", "kv_lora_", "qk_head_", "qk_pos_emb_head_", "v_head_")
    said = [key for key in _OF_ARCHITECTURE if not key.startswith(absent)]
    sizes = {key: values[key] for key in said if values.get(key) is not None}
    if "num_attention_heads" in sizes:
        sizes.setdefault("num_query_groups", sizes["num_attention_heads"])
    return OtherModel(
        name=name,
        family="",
        lacks="",
        fields=sizes,
        source="the job's file, and its framework's defaults",
        language_model=None,
        provider={},
    )


_IN_CONFIG = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "num_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Sizes by the names that most families have in ``config.json`` (transformers 5.24)."""


@cache
def _data() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@cache
def _models() -> dict[str, OtherModel]:
    data, found = _data(), dict[str, OtherModel]()
    for name, row in data["models"].items():
        family = data["families"][row["family"]]
        model = OtherModel(
            name=name,
            family=row["family"],
            lacks=row.get("lacks", family["lacks"]),
            fields=row["fields"],
            source=row["source"],
            language_model=row.get("language_model"),
            provider=family["provider"],
            frozen_by_bridge=family.get("frozen_by_bridge", False),
            fuses_no_rope=family.get("fuses_no_rope", False),
            text_provider=family.get("text_provider"),
        )
        found |= dict.fromkeys((name, *row.get("also", ())), model)
    return found
