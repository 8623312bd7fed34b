"""Goals for code that a reader writes: it is run, and what it did is judged."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_tb
from typing import Any, Self

from memlab.analysis.diagnosis import diagnose
from memlab.exercises.curves import Curve, unseen_curves
from memlab.exercises.goals import Goals, listed
from memlab.exercises.trainer import Trainer
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS

KINDS = ("leak", "retention", "growth", "spike")
"""What a function that classifies a run may answer."""
_UNSET = "a buffer has what the text names, and what your release has set by then: ask for it with getattr or hasattr"
"""What to do about an attribute that a buffer does not have."""
_OF_LISTS = "buffers and expert_parallel_buffers are lists: add them with +, and go through the buffers of the sum"
"""What to do about an attribute of a buffer that is asked of a list of them."""
_OF_MODEL = "model has the lists buffers and expert_parallel_buffers, and what your release has set by then"
"""What to do about an attribute that the model does not have."""
_SWAPPED = "your load frees the gradients: if it is the release, exchange the names of the two functions"
"""What to do if a load that nothing preceded frees everything, as a release does."""
_ON_DEVICE = "the gradients are on the device: call resize_ only on a storage that is empty, whose size() is 0"
"""What to do if a load that nothing preceded takes memory away."""
_IDLE = "your release frees no byte: empty the storage of each grad_data with resize_(0)"
"""What to do if the first release did nothing."""
_PARTLY = "your release leaves bytes in every storage: resize_(0) empties one"
"""What to do if the first release made storages smaller."""
_LISTS = "Megatron keeps buffers in two lists: buffers and expert_parallel_buffers"
"""What to do if one list of buffers was forgotten."""
_OF_CURVE = "a step of this run has only static_bytes, peak_allocated_bytes and residual_bytes: judge by these"
"""What to do about an attribute that only a record has."""
_OF_STEADY = "return spike where nothing stays and nothing grows, also where diagnose would call the run steady"
"""What to do about a run without any of the four."""
_RULES = {
    "leak": "a leak: its rise counts, and the last start exceeds the one before by 5 % of the rise or more",
    "growth": "growth: its rise counts, and the last start exceeds the one before by less than 5 % of the rise",
    "retention": "retention: its rise is below 1 % of the first start, and every step has a residual",
    "spike": "a spike: its rise is below 1 % of the first start, and at least one step has no residual",
}
"""What makes a run what it is."""
_OF_LOAD = (
    "a release stores the size before it empties the storage, and a second release must not store 0; where a "
    "storage is empty, its size() is 0, and a load calls resize_ with the stored size, in the same unit, and then "
    "zero_()"
)
"""What to do if a load does not give the gradients their memory back."""
_OF_EMPTY = "call resize_ with the stored size first, and zero_() after it; a second release must not store 0"
"""What to do if a load zeroes a storage that is empty."""
_ON_HOST = "a load of gradients needs no host memory: call zero_(), or make the zeros on the device"
"""What to do if a load makes tensors on the host."""
_OF_LAB = "use no method of the lab here: the buffers that your function gets have all that is needed"
"""What to do if the reader's code leaves the work to memlab."""
_SYNCS = (("with", True, 1.0), ("over a slower link, with", True, 2.0), ("without", False, 1.0))
"""The cases of a weight sync. Seconds that are read off the line of the first case are wrong in the second."""


class CodeCheck(Goals):
    """Goals for one function of the reader's, or for two that belong together."""

    subject = "a function"

    def __init__(self, functions: Sequence[Callable[..., object]]) -> None:
        super().__init__()
        self._functions = functions

    def moves_gradients_of(self, lab: Any) -> Self:
        """Requires a release and a load of gradients that survive every order of calls, with the audit as judge.

        Args:
            lab: A live model, whose experts should have buffers of their own.
        """
        if len(self._functions) != 2:
            return self.goal(False, "the check got one function, must get two", "write check((release, load))")
        release, load = self._functions
        calls = (
            ("load, before anything was released", lab.load, _ON_DEVICE),
            ("release", lab.offload, _LISTS),
            ("a second release right after it", lab.offload, "the storage is empty then, and so is its size"),
            ("load", lab.load, _OF_LOAD),
            ("a second load right after it", lab.load, "the storage has its size already"),
            ("another release", lab.offload, "compare with the first one"),
            ("another load", lab.load, "compare with the first one"),
        )
        with lab.own_gradient_moves(release, load):
            num_bytes = lab.audit_residency().device_bytes("gradients")
            for what, call, hint in calls:
                if error := self._result(call, "gradients")[1]:
                    of_size = "a release stores the size and empties the storage, and writes nothing"
                    of_size = of_size if call == lab.offload else hint
                    # Other errors say themselves what to do; the last part that fits counts.
                    known = {"whose storage has": of_size, "'_Buffer' object": _UNSET, "'_Model' object": _OF_MODEL}
                    known |= {"'list' object": _OF_LISTS, "code that the lab calls": _OF_LAB}
                    if hint == _OF_LOAD:
                        known["whose storage has 0 bytes"] = _OF_EMPTY
                    action = ["", *(action for part, action in known.items() if part in error)][-1]
                    return self.goal(False, f"{what}: {error}", action)
                audit = lab.audit_residency()
                if audit.complaints:
                    left = audit.device_bytes("gradients")
                    is_of_one_list = 0 < left < num_bytes and len(audit.complaints) == 1
                    action = _LISTS if is_of_one_list and hint == _OF_LOAD else hint
                    if what == "release" and not is_of_one_list:
                        action = _IDLE if left == num_bytes else _PARTLY
                    elif what == calls[0][0] and not left:
                        action = _SWAPPED
                    elif call == lab.load and audit.move_peak_host_bytes > audit.move_host_bytes:
                        action = _ON_HOST
                    return self.goal(False, f"after {what}, the audit finds: {audit.complaints[0]}", action)
        return self.goal(True, "after every release and load, every byte of the gradients is where it should be")

    def syncs_weights_of(self, lab: Any) -> Self:
        """Requires a weight sync in the right order, and the durations of its load and its offload.

        Args:
            lab: A live model. Its weights are moved; a clock without a device says how long that takes.
        """
        (sync,) = self._functions
        lab.offload(*GROUPS)
        for case, is_offloaded, slowness in _SYNCS:
            if not is_offloaded:
                lab.load("parameters")
            trainer = Trainer(lab, is_offload_param=is_offloaded, slowness=slowness)
            durations, error = self._result(sync, trainer)
            if problem := trainer.complaint or error or trainer.wrong_durations(durations):
                hint = "wait with trainer.synchronize()" if "CUDA" in error or "NVIDIA" in error else ""
                return self.goal(False, f"{case} param_offload: {problem}", hint)
        return self.goal(True, "the sync is in order with and without param_offload, and both durations are true")

    def classifies(self, runs: Mapping[str, Sequence[StepRecord]]) -> Self:
        """Requires the right kind for runs of the lab, and for some that the reader has not seen.

        Args:
            runs: Steps of each run, under a name for the line. One that shows nothing, as with very short batches, is
                left out.
        """
        (kind_of,) = self._functions
        shown = {name: diagnose(run)[0].kind.partition(" ")[0] for name, run in runs.items()}
        known = [(f"run {name}", kind, runs[name]) for name, kind in shown.items() if kind in KINDS]
        unseen = [(f"unseen run {number}", *each) for number, each in enumerate(unseen_curves(), start=1)]
        every: list[tuple[str, str, Sequence[StepRecord | Curve]]] = [*known, *unseen]
        for name, needed, steps in every:
            answer, error = self._result(kind_of, list(steps))
            if error:
                hint = _OF_CURVE if "'Curve' object has no attribute" in error else ""
                return self.goal(False, f"for {name}, your function ends in {error}", hint)
            kind = answer.lower() if isinstance(answer, str) else answer
            kind = "growth" if kind == "growth by phase" else kind
            if kind not in KINDS:
                hint = _OF_STEADY if kind == "steady" else ""
                what = f"for {name}, your function gives {answer!r}, must be one of {listed(KINDS)}"
                return self.goal(False, what, hint)
            if kind != needed:
                what = f"for {name}, your function says {kind}, which is wrong: {_shown(steps)}"
                return self.goal(False, what, f"it is {_RULES[needed]}")
        return self.goal(True, f"the function is right for {len(known)} runs of this lab and {len(unseen)} unseen ones")

    def _result(self, call: Callable[..., object], *arguments: object) -> tuple[object, str]:
        """Calls the reader's code; returns what it gave, and its error in words or an empty text."""
        try:
            return call(*arguments), ""
        except Exception as error:  # noqa: BLE001 - the reader's code may raise anything, and the notebook goes on
            return None, _in_words(error, self._functions)


def _in_words(error: Exception, functions: Sequence[Callable[..., object]]) -> str:
    """Says what an error is and at which of the reader's lines; one of memlab's says itself what to do."""
    frames = list(walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__"))
    if isinstance(error, ValueError) and raised_in.startswith(f"{__name__.partition('.')[0]}."):
        return f"{error}"
    cells = {function.__code__.co_filename for function in functions if hasattr(function, "__code__")}
    lines = [(frame.f_code.co_filename, line) for frame, line in frames if frame.f_code.co_filename in cells]
    if not lines:
        return f"{type(error).__name__}: {error}"
    source = linecache.getline(*lines[-1]).strip()
    return f"{type(error).__name__}: {error}, in line {lines[-1][1]} of your cell{f' ({source})' * bool(source)}"


def _shown(steps: Sequence[StepRecord | Curve]) -> str:
    """Writes what decides the kind of a run, in GiB, or in MiB for a tiny model."""
    unit, name = (2**30, "GiB") if steps[0].peak_allocated_bytes > 2**30 else (2**20, "MiB")
    columns = {
        "starts": [step.static_bytes for step in steps],
        "peaks": [step.peak_allocated_bytes for step in steps],
        "residuals": [step.residual_bytes for step in steps],
    }
    return (
        "; ".join(f"{what} {', '.join(f'{each / unit:.2f}' for each in of)}" for what, of in columns.items())
        + f" {name}"
    )
