"""A slider that has a name: the handle of ipywidgets' own is one that a screen reader cannot tell."""

from __future__ import annotations

import anywidget
import traitlets

_PAGE_CODE = """
function render({ model, el }) {
  const range = el.appendChild(document.createElement("input"));
  range.type = "range";
  range.setAttribute("aria-label", model.get("name"));
  const names = ["min", "max", "value", "disabled"];  // the ends first: a value beyond them would be cut
  const follow = () => names.forEach((name) => { range[name] = model.get(name); });
  follow();
  names.forEach((name) => model.on(`change:${name}`, follow));
  range.addEventListener("change", () => {
    model.set("value", range.valueAsNumber);
    model.save_changes();
  });
  return () => names.forEach((name) => model.off(`change:${name}`, follow));
}

export default { render };
"""


class Slider(anywidget.AnyWidget):
    """The browser's own slider of whole numbers; its value changes where the handle is let go."""

    _esm = _PAGE_CODE

    name = traitlets.Unicode().tag(sync=True)
    """What it sets, for who does not see where it stands."""
    min = traitlets.Int(0).tag(sync=True)
    max = traitlets.Int(0).tag(sync=True)
    value = traitlets.Int(0).tag(sync=True)
    disabled = traitlets.Bool(default_value=False).tag(sync=True)

    def __init__(self, **traits: object) -> None:
        super().__init__(**traits)
        self.add_class("memlab-slider")
