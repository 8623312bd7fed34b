"""papermill's engine with two changes: the output of a notebook is bounded, and its kernel uses no network ports.

papermill keeps every output in the notebook and copies text to the log, and the page is made from the notebook. A run
that prints without an end would fill the disk. So the messages of the kernel are shortened before papermill sees them.

Jupyter chooses five free ports and starts the kernel, which takes them a second or more later. If another process has
taken one of them meanwhile, the kernel dies before its first cell. So the kernel gets sockets with names instead.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.utils import logger, merge_kwargs, remove_args
from traitlets.config import Config

ENGINE = "memlab"

MAX_PRINTED_LETTERS = 2**20
"""Per cell: what it prints."""
MAX_TRACEBACK_LETTERS = 10**5
MAX_SHOWN_LETTERS = 64 * 2**20
"""Per notebook: figures, tables and other results, as JSON."""


class OutputBound:
    """Shortens the messages that carry a notebook's output."""

    def __init__(self) -> None:
        self._cell_index = -1
        self._printed = self._shown = 0

    def bounded(self, message: dict[str, Any], cell_index: int) -> dict[str, Any] | None:
        """Returns a message as it is, shortened, or None if nothing of it is kept.

        Args:
            message: Of the kernel, in the Jupyter messaging protocol.
        """
        if cell_index != self._cell_index:
            self._cell_index, self._printed = cell_index, 0
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                return self._bounded_stream(message, content)
            case "error":
                return message | {"content": content | _bounded_error(content)}
            case "execute_result" | "display_data" | "update_display_data":
                size = len(json.dumps(content["data"], default=str))
                if self._shown + size > MAX_SHOWN_LETTERS:  # a smaller output after it may still fit
                    note = f"[left out: the notebook shows more than {MAX_SHOWN_LETTERS:,} letters]"
                    return message | {"content": content | {"data": {"text/plain": note}, "metadata": {}}}
                self._shown += size
        return message

    def _bounded_stream(self, message: dict[str, Any], content: dict[str, Any]) -> dict[str, Any] | None:
        left = MAX_PRINTED_LETTERS - self._printed
        self._printed += len(content["text"])
        if self._printed <= MAX_PRINTED_LETTERS:
            return message
        if left < 0:
            return None
        note = f"\n[left out: the cell prints more than {MAX_PRINTED_LETTERS:,} letters]\n"
        return message | {"content": content | {"text": content["text"][:left] + note}}


def _bounded_error(content: dict[str, Any]) -> dict[str, Any]:
    lines: list[str] = content["traceback"]
    if sum(map(len, lines)) > MAX_TRACEBACK_LETTERS:
        half = MAX_TRACEBACK_LETTERS // 2
        text = "\n".join(lines)
        lines = [text[:half], "[left out]", text[-half:]]
    return {"traceback": lines, "evalue": content["evalue"][: MAX_TRACEBACK_LETTERS // 10]}


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bound = OutputBound()

    def process_message(self, message: dict[str, Any], cell: Any, cell_index: int) -> Any:
        bounded = self._bound.bounded(message, cell_index)
        return None if bounded is None else super().process_message(bounded, cell, cell_index)


class _Engine(NBClientEngine):  # type: ignore[misc]
    """papermill's own engine but for the client and the kernel's sockets."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
        start_timeout, timeout = options.pop("start_timeout"), options.pop("execution_timeout", None)
        others = remove_args(["input_path", "timeout", "startup_timeout"], **options)
        own = {"timeout": timeout, "startup_timeout": start_timeout, "kernel_name": kernel_name, "log": logger}
        arguments = merge_kwargs(others, **own)
        return _Client(nb_man, config=_kernel_without_ports(), **arguments).execute()


def _kernel_without_ports() -> Config:
    """Returns a configuration in which the kernel's sockets have names that no other process takes."""
    if sys.platform != "linux":  # only Linux has sockets with names that are no files (unix(7), "abstract")
        return Config()
    return Config({"KernelManager": {"transport": "ipc", "ip": f"@memlab-{uuid.uuid4().hex}"}})


def register_engine() -> None:
    """Makes the engine known to papermill as `ENGINE`."""
    papermill_engines.register(ENGINE, _Engine)
