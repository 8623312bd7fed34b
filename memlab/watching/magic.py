"""The cell magic ``%%memlab``, which watches its cell."""

from __future__ import annotations

from typing import Any

from memlab.watching.watch import watch

_USAGE = "write %%memlab model, or %%memlab model optimizer as run"


class CellSyntaxError(ValueError):
    """The cell is no Python. IPython shows this as it shows any other such cell, without the frames of the magic."""

    def __init__(self, shell: Any, error: SyntaxError) -> None:
        super().__init__(f"the cell below %%memlab cannot be compiled: {error}: correct it, and run it again")
        self._shell = shell
        self._error = error

    def _render_traceback_(self) -> list[str]:
        # IPython's hook for errors that say how they are shown (`InteractiveShell.showtraceback`).
        shown: list[str] = self._shell.SyntaxTB.structured_traceback(type(self._error), self._error, [])
        return shown


def register(shell: Any) -> None:
    """Adds ``%%memlab`` to an IPython shell; ``%load_ext memlab`` calls this."""
    shell.register_magic_function(lambda line, cell: _watch_cell(shell, line, cell), "cell", "memlab")


def _names_in(line: str) -> tuple[list[str], str]:
    """Returns the names of the model and of its optimizers, and the name under which the run is kept, if any."""
    words = line.split()
    names, kept_as = (words[: words.index("as")], words[words.index("as") + 1 :]) if "as" in words else (words, [""])
    refused = f"%%memlab got '{line.strip()}', must name"
    if not names:
        raise ValueError(f"{refused} a model: {_USAGE}")
    if "as" in words and not (len(kept_as) == 1 and kept_as[0].isidentifier()):
        raise ValueError(f"{refused} the run in one word after 'as': {_USAGE}")
    for name in names:
        try:
            compile(name, "%%memlab", "eval")
        except SyntaxError:
            raise ValueError(
                f"{refused} a model and its optimizers, and {name} is not an expression: {_USAGE}"
            ) from None
    return names, kept_as[0]


def _watch_cell(shell: Any, line: str, cell: str) -> None:
    """Runs a cell inside `memlab.watch`, and shows the timeline and the table, also if the cell raises.

    Args:
        shell: Whose names the cell uses and sets.
        line: The names of the model and of its optimizers, and ``as NAME`` where the run is to be kept.
        cell: Its last expression is not shown.

    Raises:
        ValueError: If the line names no model, or the cell is no Python.
    """
    names, kept_as = _names_in(line)
    # The lines have the notebook's numbers: %%memlab is the first, and IPython drops blank ones at the beginning.
    blank = cell[: len(cell) - len(cell.lstrip())]
    source = "\n" * (1 + blank.count("\n")) + shell.transform_cell(cell)
    file_name = shell.compile.cache(source, shell.execution_count, raw_code=source)  # tracebacks show the lines
    try:
        # Not with this module's `from __future__ import annotations`: the cell's annotations stay objects.
        code = compile(source, file_name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CellSyntaxError(shell, error) from None
    run = None
    try:
        with watch(*map(shell.ev, names), name=kept_as) as run:  # no name here: the cell may free the model
            exec(code, shell.user_ns)  # noqa: S102  # the user's own cell
    finally:
        if run is not None:
            if kept_as:
                shell.user_ns[kept_as] = run
            from IPython.display import display

            display(run.show())  # type: ignore[no-untyped-call]
