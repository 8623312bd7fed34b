"""A table's row, a framework's key and the field of memlab that it means, with the conversions between their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from memlab.config.option import Kind
from memlab.config.pipeline_layout import text_of_layout
from memlab.config.validation import is_number, is_whole_number, shortened

ABSENT = "absent"
"""The default of a key without which the framework sets nothing: memlab's own default stays."""

Effect = Literal["more", "less", "either", "unknown"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a value of a framework becomes one of memlab, and back."""

    read: Callable[[Any], Any]
    """Raises `ValueError` with what the value must be."""
    write: Callable[[Any], Any]

    def checked(self, place: str, key: str, value: Any) -> Any:
        """Returns memlab's value.

        Raises:
            ValueError: If the value is of another kind, with the key and its place.
        """
        try:
            return self.read(value)
        except ValueError as error:
            raise refusal(place, key, value, error) from error


Blocked = Literal["model", "towers", "precision", "engine", "job"]
"""What memlab does not have of a job: its model, which one that the user gives may replace; only the towers of its
model, beside a language model; the type in which it computes; the engine that trains, whose fields are known; or what
it does, whatever its model is."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a framework that means one field of memlab."""

    name: str
    """In the framework's spelling; of a flag, with underscores and without dashes."""
    field: str
    """The field of `Scenario`, `Layout`, `TrainingState`, `MemorySettings`, `AllocatorSettings` or `Architecture`, or a
    name that the framework's module reads."""
    conversion: Conversion
    default: Any = ABSENT
    """The field's value if the file does not give the key, as memlab writes it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that changes memory and that memlab does not model."""

    name: str
    effect: Effect
    """Whether a step needs more or less memory with it than memlab says."""
    reason: str
    is_on: Callable[[Any], bool] = bool
    """Whether a value switches it on."""
    blocks: bool = False
    """Whether a prediction without it would be of another model, or of another job."""
    default: Any = ABSENT
    """The framework's value if the file does not give the key; `ABSENT` where that is what memlab models."""
    of: Blocked = "model"
    """Of what blocks: what memlab does not have."""
    parts: tuple[str, ...] = ()
    """How keys of the same section begin that say how large it is: without it they have no effect."""


def is_false(value: Any) -> bool:
    """Whether a value switches something off that is on in memlab."""
    return value is False


def is_given(value: Any) -> bool:
    """Whether a value switches something on that takes any text, number or list, such as a path."""
    return value not in (None, False, 0, "", [], (), {})


def other_than(*values: Any) -> Callable[[Any], bool]:
    """Returns whether a value is given and is none of these."""
    return lambda value: value is not None and value not in values


def _without_quotes(value: Any) -> str:
    is_number_in_quotes = isinstance(value, str) and re.fullmatch(r"-?\d{1,18}(\.\d{1,18})?", value, re.ASCII)
    return f", such as {value} without quotes" if is_number_in_quotes else ""


def _read_whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if value is not None and not is_whole_number(value, at_least=-(2**62)):
        raise ValueError(f"must be a whole number{_without_quotes(value)}")
    return value


def _read_window(value: Any) -> tuple[int, ...] | None:
    # `tuple_type` of megatron/training/arguments.py, 0.16.1.
    if value is None:
        return None
    parts = value if isinstance(value, (list, tuple)) else str(value).strip("()[] ").split(",")
    if len(parts) != 2 or not all(re.fullmatch(r"-?\d{1,9}", str(part).strip(), re.ASCII) for part in parts):
        raise ValueError("must be two whole numbers, such as 127,0")
    found = tuple(int(part) for part in parts)
    return None if found[0] == -1 else found  # -1 is a window without end


def _read_count(value: Any) -> Any:
    number = _read_whole(value)
    if number is not None and number < 1:
        raise ValueError("must be a whole number of at least 1")
    return number


_LARGEST_NUMBER = 1e18
"""Larger numbers, and infinity, are in no real job, and calculations with them overflow."""


def _read_number(value: Any) -> Any:
    if value is not None and not (is_number(value) and abs(value) <= _LARGEST_NUMBER):
        raise ValueError(f"must be a number of at most {_LARGEST_NUMBER:g}{_without_quotes(value)}")
    return value


_TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False, "none": False}


def _read_switch(value: Any) -> bool:
    truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
    if truth is None:
        raise ValueError("must be true or false")
    return truth


def _read_text(value: Any) -> Any:
    if value is None or value is False or value == {}:
        return None
    if isinstance(value, (list, bool)):
        raise ValueError("must be a text")
    return str(value)


def _read_words(value: Any) -> Any:
    if value is None or value == "":
        return None
    if value is True:  # a flag without words
        return ()
    parts = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return tuple(str(part) for part in parts)


_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32", "fp16": "fp16",
    "float16": "fp16", "half": "fp16", "fp8": "fp8", "uint8": "fp8",
}  # fmt: skip
_LONG_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp8": "uint8"}


def _read_dtype(value: Any) -> str:
    short = _DTYPES.get(str(value).lower().removeprefix("torch."))
    if short is None:
        raise ValueError(f"must be one of {', '.join(_DTYPES)}")
    return short


def _read_router_dtype(value: Any) -> str:
    # megatron/core/transformer/moe/router.py, 0.16.1: all but two texts leave the type as it is, a type of torch too.
    names = {"float32": "fp32", "float64": "fp64"}
    names |= dict.fromkeys(("none", "bf16", "bfloat16", "torch.float32", "torch.float64"), "params_dtype")
    name = str(value).lower()
    found = names.get(name, name)
    if found not in ("fp32", "fp64", "params_dtype"):
        raise ValueError("must be fp32, fp64 or none")
    return found


def _read_load_balancing(value: Any) -> str:
    # The router looks for the losses that it has: None is none of them (megatron/core/transformer/moe/router.py).
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    found = "none" if one is None else str(one)
    if found not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
        raise ValueError("must be aux_loss, seq_aux_loss, global_aux_loss or none, since memlab has no other")
    return found


def exchange_of(value: Any) -> str | None:
    """Returns what context parallel ranks exchange; None if memlab does not have it, or if it differs between layers.

    Megatron takes one value, or a list with one for each layer (``cp_comm_type``); Megatron-LM's has one or all.
    """
    kinds = {str(one) for one in value} if isinstance(value, list) else {"p2p" if value is None else str(value)}
    return next(iter(kinds)) if kinds in ({"p2p"}, {"a2a"}) else None


def _read_capacity(value: Any) -> Any:
    # megatron/core/transformer/transformer_config.py, 0.16.1: below 0, no token is dropped.
    number = _read_number(value)
    return None if number is None or number < 0 else number


def _read_backend(value: Any) -> str:
    name = str(value).lower().rpartition("attnbackend.")[2].partition(":")[0].strip("<> ")
    # The values of Megatron's enum `AttnBackend`.
    return {"1": "flash", "2": "fused", "3": "unfused", "4": "local", "5": "auto", "none": "auto"}.get(name, name)


def _same(value: Any) -> Any:
    return value


WHOLE = Conversion(_read_whole, _same)
WINDOW = Conversion(_read_window, lambda window: None if window is None else list(window))
COUNT = Conversion(_read_count, _same)
NUMBER = Conversion(_read_number, _same)
SWITCH = Conversion(_read_switch, _same)
NOT = Conversion(lambda value: not _read_switch(value), lambda value: not value)
TEXT = Conversion(_read_text, _same)
WORDS = Conversion(_read_words, lambda value: None if value is None else list(value))
DTYPE = Conversion(_read_dtype, _same)
LONG_DTYPE = Conversion(_read_dtype, lambda value: _LONG_DTYPES[value])
ROUTER_DTYPE = Conversion(_read_router_dtype, lambda value: None if value == "params_dtype" else value)
PIPELINE_LAYOUT = Conversion(lambda value: None if not value else text_of_layout(value), _same)
LOAD_BALANCING = Conversion(_read_load_balancing, _same)
DISPATCHER = Conversion(lambda value: value if value in ("allgather", "flex") else "alltoall", _same)
FLEX_BACKEND = Conversion(lambda value: "hybridep" if value == "hybridep" else "deepep", _same)
"""Another dispatcher or library is named as not modelled."""
DEEP_EP_SMS = Conversion(lambda value: _read_whole(value) or 20, _same)
"""Megatron-Core's own default, and that of DeepEP where newer configs have None."""
CP_COMM_TYPE = Conversion(lambda value: exchange_of(value) or "p2p", _same)
"""Another exchange is named as not modelled."""
IMPLEMENTATION = Conversion(lambda value: "local" if value == "local" else "transformer_engine", _same)
"""Of the layers; another one is named as not modelled."""
CUDA_GRAPHS = Conversion(lambda value: "full_iteration" if value == "full_iteration" else "none", _same)
"""Graphs of layers are named as not modelled."""
CAPACITY = Conversion(_read_capacity, _same)
EXTRA_LAYERS = Conversion(lambda value: _read_whole(value) or None, _same)
"""Megatron-Core's configs have None or 0 for none."""
BACKEND = Conversion(_read_backend, _same)
CONVERSIONS: dict[Kind, Conversion] = {
    "switch": SWITCH, "choice": TEXT, "modules": WORDS, "whole": WHOLE, "number": NUMBER, "name": TEXT,
}  # fmt: skip
"""By the kind of an option of memlab."""
NONE_WORD = Conversion(
    lambda value: None if value in (None, "none") else _read_text(value),
    lambda value: "none" if value is None else value,
)
"""A text whose absence is written as the word ``none``."""
POSITIONS = Conversion(lambda value: "none" if value is None else _read_text(value), _same)
"""The word ``none`` is a kind of positions, and elsewhere no value."""


LANGUAGE_MODEL = ("freeze_llm", "freeze_language_model")
PARTS_OF_MULTIMODAL_MODELS = (
    *LANGUAGE_MODEL, "freeze_vit", "freeze_aligner", "freeze_vision_model", "freeze_vision_projection",
    "freeze_audio_model", "freeze_audio_projection", "freeze_sound_encoder", "freeze_sound_projection",
    "freeze_mtp_model",
)  # fmt: skip
"""What multimodal models can freeze: in ms-swift 4.6.0, and as arguments of ``freeze`` in the models of
Megatron-Bridge, which NeMo-RL passes on (main of August 2026)."""


def frozen_parts(*prefixes: str) -> tuple[Missing, ...]:
    """Returns the rows of keys that freeze one part of a multimodal model each, below prefixes."""
    reason = "the frozen parts of a multimodal model have no gradients and no optimizer state"
    return tuple(
        Missing(f"{prefix}{part}", "less", reason) for prefix in prefixes for part in PARTS_OF_MULTIMODAL_MODELS
    )


ALLOCATOR = (
    Key("PYTORCH_CUDA_ALLOC_CONF", "allocator", TEXT),
    Key("PYTORCH_ALLOC_CONF", "allocator", TEXT),
)
"""Variables of the environment that set torch's allocator; a framework reads them under its own prefix."""


def under(prefix: str, keys: Iterable[Key], **defaults: Any) -> tuple[Key, ...]:
    """Returns keys that a framework passes on under a prefix, with the framework's own defaults by field."""
    return tuple(
        replace(key, name=f"{prefix}.{key.name}", default=defaults.get(key.field, key.default)) for key in keys
    )


def missing_under(prefix: str, rows: Iterable[Missing], **defaults: Any) -> tuple[Missing, ...]:
    """Returns rows of what is not modelled, with their names under a prefix, and the framework's own defaults."""
    return tuple(replace(row, name=f"{prefix}.{row.name}", default=defaults.get(row.name, row.default)) for row in rows)


def with_defaults(keys: Iterable[Key], **defaults: Any) -> tuple[Key, ...]:
    """Returns keys with other defaults, by field."""
    return tuple(replace(key, default=defaults.get(key.field, key.default)) for key in keys)


def refusal(place: str, key: str, value: Any, rule: object) -> ValueError:
    """Returns the error for a value that cannot be understood."""
    return ValueError(f"{place}: {key} is {shortened(value)}, {rule}: correct it")
