"""Opens the models of a panel's widgets when the panel is complete: one message each, with the state that it then has.

ipywidgets opens a widget's model when the widget is made, and sends each later change by itself: 1,545 messages for a
panel of 238 models, within a second. The kernel's socket for outputs queues at most 1,000 messages per connection. That
is libzmq's default; ipykernel 7.4.0 sets no other limit (`IPKernelApp.init_iopub`). What comes while the queue is full
is dropped without an error. On a busy machine, the thread that empties the queue can be too slow for that many
messages. Then the page lacks models, or it never learns that the cell has ended and waits for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets

from memlab.upstream.patching import swapped

_one_at_a_time = threading.Lock()


@contextmanager
def opened_when_complete(root: Any) -> Iterator[None]:
    """Widgets that this thread makes in the block have no model; at its end `root` and all widgets in it get theirs.

    A widget in the block that is not in `root` at the end gets none: nobody sees it.
    """
    thread = threading.current_thread()
    with _one_at_a_time:
        open_now = ipywidgets.Widget.open

        def open_later(widget: Any) -> None:
            if threading.current_thread() is not thread:
                open_now(widget)

        with swapped([(ipywidgets.Widget, "open", open_later)]):
            yield
    for widget in reversed(widgets_in(root)):  # a state names the models of its children, which have to exist
        for part in (widget.layout, getattr(widget, "style", None), widget):
            if part is not None:
                part.open()


def widgets_in(root: Any) -> list[Any]:
    """Returns a widget and all widgets inside it, each before its children."""
    return [root, *(found for child in getattr(root, "children", ()) for found in widgets_in(child))]
