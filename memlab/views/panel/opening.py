"""A row of controls that opens a lab, for who has none yet: the model, what trains it, the versions, the adapters."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from memlab.config.architectures import ARCHITECTURES
from memlab.config.lora import LoRA
from memlab.config.option import options_of
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.config.versions import MEASURED, READ, TITLES, Versions
from memlab.views.panel.option_control import OptionControl
from memlab.views.panel.static_files import page_code

if TYPE_CHECKING:
    from memlab.lab.lab import Lab

_INSTALLED = "installed"
_FIRST_MODEL = "qwen3-moe-tiny"
_FEW_LAYERS = 4
"""What the row proposes: a whole large model takes many seconds to build, and few layers show the same settings."""


class Opening(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets ships no types
    """The row, and below it the panel of the lab that it has opened. `memlab.panel` makes it.

    A tiny model trains in this process. Of a model of full size, steps are predicted.

    Args:
        open_lab: `memlab.Lab`, or a test's substitute.
    """

    def __init__(self, panel_of: Callable[[Any], Any], open_lab: Callable[..., Lab]) -> None:
        self._panel_of, self._open_lab = panel_of, open_lab
        self.lab: Lab | None = None
        """The lab that is open; None before the first."""
        names = sorted(ARCHITECTURES, key=lambda name: (not _trains_here(name), name))
        self.model = ipywidgets.Dropdown(options=names, value=_FIRST_MODEL, description="model")
        self.model.tooltip = "A tiny model trains in this process; steps of the others are predicted"
        self.layers = ipywidgets.IntText(value=_FEW_LAYERS, description="layers")
        self.layers.tooltip = "How many of the model's layers to build"
        self._engine = OptionControl(options_of(Scenario)["engine"])
        self.engine = self._engine.widget
        self.engine.description = "engine"
        self.versions = {name: _version_choice(name) for name in ("transformer_engine", "megatron_core")}
        self.lora_rank = ipywidgets.IntText(value=0, description="LoRA rank (0: none)")
        self.lora_rank.tooltip = options_of(LoRA)["rank"].sentence()
        self.open_button = ipywidgets.Button(description="Open", button_style="primary")
        self.open_button.tooltip = "Opens a lab with this model; the lab that is open is closed"
        self.said = ipywidgets.HTML()
        self.said.add_class("memlab-opening-said")
        looks = ipywidgets.HTML(f"<style>{page_code('panel.css')}</style>")  # a panel brings its own, but comes later
        controls = [self.model, self.layers, self.engine, *self.versions.values(), self.lora_rank]
        for control in controls:
            control.style.description_width = "initial"
        row = ipywidgets.Box([*controls, self.open_button, self.said, looks])
        row.add_class("memlab-opening-row")
        self._row = row
        super().__init__([row])
        self.add_class("memlab-opening")
        self.open_button.on_click(lambda _: self.open_chosen())
        self._engine_before: str | None = None
        """What the engine's control had before a model that one engine alone has; None if it is what somebody chose."""
        self.model.observe(lambda _: self._propose(), names=["value"])
        self._say("Choose a model, and press Open.")

    def open_chosen(self) -> None:
        """Opens a lab as the controls say, and shows its panel; a refusal stands beside the button."""
        name, rank = self.model.value, self.lora_rank.value
        self.open_button.disabled = True
        self._say(f"Opening {name} ...")
        try:
            versions = {name: control.value for name, control in self.versions.items() if control.value != _INSTALLED}
            options: dict[str, Any] = {
                "num_layers": self.layers.value,
                "engine": self._engine.value(self.engine.value),
                "versions": Versions(**versions),
                "state": TrainingState(lora=LoRA(rank=rank) if rank else None),
            }
            Scenario.of(name, **options)  # refuses what breaks a rule, before the open lab is closed
            self.children = [self._row]
            if self.lab is not None:
                self.lab.close()
                self.lab = None  # the next one may be refused
            self.lab = self._open_lab(name, backend="auto" if _trains_here(name) else "simulated", **options)
        except ValueError as error:
            self._say(f"Not opened: {error}")
            return
        finally:
            self.open_button.disabled = False
        self.children = [self._row, self._panel_of(self.lab)]
        self._say(f"{name} {'trains in this process' if _trains_here(name) else f'is predicted, {self._built()}'}.")

    def _built(self) -> str:
        """Says what the open lab has of its model: few layers on one GPU are not the user's whole job."""
        built, total = self.layers.value, ARCHITECTURES[self.model.value].num_layers
        return f"{f'all {total}' if built == total else f'{built} of {total}'} layers on one GPU"

    def _propose(self) -> None:
        model = ARCHITECTURES[self.model.value]
        self.layers.value = min(_FEW_LAYERS, model.num_layers)
        if self._engine_before is not None:
            self.engine.value, self._engine_before = self._engine_before, None
        if model.only_in_transformers:
            self._engine_before, self.engine.value = self.engine.value, "fsdp2"

    def _say(self, text: str) -> None:
        self.said.value = f'<div role="status">{html.escape(text, quote=False)}</div>'


def _trains_here(name: str) -> bool:
    return name.endswith("-tiny")


def _version_choice(name: str) -> Any:
    known = sorted({*MEASURED[name], *READ[name]}, key=lambda release: [int(part) for part in release.split(".")])
    usual = getattr(Versions(), name)
    return ipywidgets.Dropdown(
        options=known if usual else [_INSTALLED, *known],
        value=usual or _INSTALLED,
        description=TITLES[name],
        tooltip=f"The release of {TITLES[name]} where the job runs",
    )
