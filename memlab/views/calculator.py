"""A calculator in the text of a lab: sliders, the formulas of the cheat sheet, and one bar beside the memory of a GPU.

Without a browser it is text.
"""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

from memlab.analysis.by_hand import bytes_by_hand, formulas_of
from memlab.config.architectures import Architecture, find_architecture
from memlab.units import GIB, format_bytes
from memlab.views.figures.palette import CATEGORY_LOOKS

_LIMIT_BYTES = 80 * GIB
_COLOURS = {"kept by the layers": "activations", "logits, outputs of embedding and last norm": "temporary"}
_WORDS = {"none": "no recompute", "full": "full recompute", "mlp": "recompute mlp", "core_attn": "recompute core_attn"}
_MOST_TOKENS, _TOKENS_STEP = 32_768, 256
_LABELS_FIT: dict[str, Any] = {
    "style": {"description_width": "initial"},
    "layout": {"width": "32em", "max_width": "100%"},
}


class Calculator(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """Two sliders and a choice over a bar, for one architecture. `memlab.calculator` makes it."""

    def __init__(self, model: Architecture, num_layers: int, tokens: int) -> None:
        self.model = model
        self.tokens = ipywidgets.IntSlider(
            tokens, min=_TOKENS_STEP, max=_MOST_TOKENS, step=_TOKENS_STEP, description="tokens", **_LABELS_FIT
        )
        self.num_layers = ipywidgets.IntSlider(
            num_layers, min=1, max=model.num_layers, description="layers", **_LABELS_FIT
        )
        choices = [(_WORDS[name], name) for name in formulas_of(model)]
        self.recompute = ipywidgets.Dropdown(options=choices, description="recompute", **_LABELS_FIT)
        self.bar = ipywidgets.HTML()
        controls = [self.tokens, self.num_layers, self.recompute]
        super().__init__([*controls, self.bar])
        for control in controls:
            control.observe(lambda _: self._show(), names=["value"])
        self._show()

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the current values, by what they are."""
        return bytes_by_hand(self.model, self.num_layers.value, self.tokens.value, self.recompute.value)

    @property
    def text(self) -> str:
        """A line with the current values and their bytes in total, and a line with the bytes of each part."""
        return f"{self._total()}\n{', '.join(f'{name} {format_bytes(size)}' for name, size in self.parts.items())}"

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Returns the widget, and the text for a page without widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"text/plain": self.text, "application/vnd.jupyter.widget-view+json": view}

    def _total(self) -> str:
        total = sum(self.parts.values())
        left = _LIMIT_BYTES - total
        layers = f"{self.num_layers.value} layer{'s' if self.num_layers.value > 1 else ''}"
        return (
            f"{self.model.name}, {layers}, {self.tokens.value:,} tokens, {_WORDS[self.recompute.value]}: "
            f"{format_bytes(total)} when backward begins, {format_bytes(abs(left))} "
            f"{'less' if left >= 0 else 'more'} than 80 GiB"
        )

    def _show(self) -> None:
        parts = self.parts
        whole = max(_LIMIT_BYTES, sum(parts.values()))
        pieces = "".join(
            f'<span style="width:{size / whole:.4%};background:{_colour(name)}"></span>' for name, size in parts.items()
        )
        names = " ".join(
            f'<span style="white-space:nowrap"><i style="display:inline-block;width:.8em;height:.8em;background:'
            f'{_colour(name)}"></i> {name} {format_bytes(size)}</span>'
            for name, size in parts.items()
        )
        total = html.escape(self._total(), quote=False)
        limit = f"position:absolute;left:{_LIMIT_BYTES / whole:.4%};top:-4px;bottom:-4px;border-left:2px dashed"
        self.bar.value = (
            '<div style="position:relative;margin:.6em 0;max-width:48em" aria-hidden="true">'
            f'<div style="display:flex;height:1.6em;border:1px solid">{pieces}</div><div style="{limit}"></div></div>'
            f'<div style="line-height:1.5">{names}</div>'
            f'<div role="status" style="line-height:1.5;white-space:normal">{total}</div>'
        )


def calculator(architecture: str, *, num_layers: int = 4, tokens: int = 4096) -> Calculator:
    """Computes by hand what one GPU holds when backward begins, and draws it as a bar beside 80 GiB.

    The formulas are those of the labs' cheat sheet, for one rank, one sequence per micro-batch, and no offload.

    Args:
        architecture: The name of an architecture, or the path of a ``config.json``.
        num_layers: Where the slider of layers starts; it goes from 1 to the layers of the architecture.
        tokens: Where the slider of tokens starts; it goes from 256 to 32,768.

    Returns:
        The calculator; without a browser it is text.

    Raises:
        ValueError: If there is no such architecture, or a slider cannot start at a value.
    """
    model = find_architecture(architecture)
    for name, value, least, most in (
        ("num_layers", num_layers, 1, model.num_layers),
        ("tokens", tokens, _TOKENS_STEP, _MOST_TOKENS),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, must be from {least:,} to {most:,}: choose such a number")
    return Calculator(model, num_layers, tokens)


def _colour(name: str) -> str:
    return CATEGORY_LOOKS[_COLOURS.get(name, name)].colour
