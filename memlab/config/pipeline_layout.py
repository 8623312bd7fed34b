"""Megatron's text of which layers each chunk of a pipeline has: ``Ettt|(tt|)*29L``.

``E`` is the embedding, ``t`` a transformer layer, ``m`` one of multi-token prediction and ``L`` the loss; ``|`` begins
the next chunk, from stage to stage and then from the first stage on again (``parse_str_to_list`` in
megatron/core/transformer/pipeline_parallel_layer_layout.py, 0.16.1).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from memlab.config.validation import RuleError, shortened

FIELD = "pipeline_model_parallel_layout"
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_MOST_LETTERS = 100_000
_REPEATED = (re.compile(r"\(([^()]+)\)\*(\d{1,5})"), re.compile(r"([^*\d])\*(\d{1,5})"))


@cache
def layers_of_pipeline_chunks(text: str) -> tuple[int, ...]:
    """Returns how many transformer layers each chunk has, in the order of the text.

    Raises:
        RuleError: If the text is not one, or names layers that memlab does not have.
    """
    unrolled = _unrolled(text)
    wrong = set(unrolled) - {*_LETTERS.values(), "|"}
    if wrong:
        raise _refusal(text, "may have only E, t, m, L, | and repetitions such as (tt|)*3: correct it")
    if "m" in unrolled.rpartition("|")[2].rstrip("L").rstrip("m") or "m" in unrolled.rpartition("|")[0]:
        raise _refusal(
            text,
            "must have m only just before L, since memlab has layers of multi-token prediction on the stage of the "
            "loss: move them",
        )
    layers = unrolled.replace("|", "").replace("m", "")
    if not (layers.startswith("E") and layers.endswith("L")) or layers.count("E") != 1 or layers.count("L") != 1:
        raise _refusal(text, "must begin with one E and end with one L, by a rule of Megatron-Core: correct it")
    return tuple(chunk.count("t") for chunk in unrolled.split("|"))


def extra_layers(text: str) -> int:
    """Returns how many layers of multi-token prediction a text names."""
    return _unrolled(text).count("m")


def without_extra_layers(text: str) -> str:
    """Returns a text without its layers of multi-token prediction."""
    return re.sub(r"(\([m, ]+\)|m)(\*\d+)?", "", text)


def _unrolled(text: str) -> str:
    """Returns a text without repetitions, commas and spaces."""
    unrolled = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATED:
        while found := pattern.search(unrolled):
            if len(unrolled) + len(found[1]) * int(found[2]) > _MOST_LETTERS:
                raise _refusal(text, f"must have at most {_MOST_LETTERS:,} layers: correct it")
            unrolled = unrolled[: found.start()] + found[1] * int(found[2]) + unrolled[found.end() :]
    return unrolled


def text_of_layout(value: Any) -> str:
    """Returns the text of a layout that a job gives, as text or as lists of words such as ``decoder``.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(value, str):
        return value
    names = {word for chunk in value for word in chunk} if _is_lists(value) else {""}
    if not names <= _LETTERS.keys():
        raise ValueError("must be a text such as 'Ett|tt|ttL', or lists of embedding, decoder, mtp and loss")
    return "|".join("".join(_LETTERS[word] for word in chunk) for chunk in value)


def _is_lists(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(chunk, list) and all(isinstance(word, str) for word in chunk) for chunk in value
    )


def _refusal(text: str, rule: str) -> RuleError:
    return RuleError(f"{FIELD} is {shortened(text)}, {rule}", FIELD)
