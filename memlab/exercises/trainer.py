"""The trainer of a weight sync, as a reader's code sees it: moves on a live model, and a clock of a device that queues.

A CPU copies at once, and its times say nothing about a GPU. So the clock is not real: a call returns after a
millisecond, its copy runs in a queue, as in a CUDA stream, and ends about a tenth of a second later. To read the clock
takes time too, as `benchmarks/upstream_errors.py` measured for a timer around nothing.
"""

from __future__ import annotations

import math
from typing import Any

CALL_SECONDS, READ_SECONDS, BROADCAST_SECONDS = 0.001, 0.000001, 4.0
COPY_SECONDS = {"load": 0.1, "hand over": 0.12, "offload": 0.15}
_DURATIONS = ("load", "offload")
_READS = 2 * len(_DURATIONS)
"""How often two timers read the clock."""
_OF_READS = 0.001
"""The share of a duration by which reading the clock may lengthen it; a call takes more than this."""


class Trainer:
    """What a function that syncs weights gets.

    Args:
        lab: A live model. With `is_offload_param`, its parameters are on the host.
        is_offload_param: Whether parameters stay on the host between steps, as verl's ``_is_offload_param`` says. Like
            verl's, it is a switch and stays as it is while they are loaded.
        slowness: How many times as long as usual each copy takes.
    """

    def __init__(self, lab: Any, *, is_offload_param: bool, slowness: float = 1.0) -> None:
        self._is_offload_param = is_offload_param
        self._slowness = slowness
        self._complaint = ""
        self._comes_before_hand_over = self._calls_hand_over = False
        self._lab = lab
        self._now = 1000.0
        self._num_reads = 0
        self._queue_ends = 0.0
        self._done: list[str] = []

    @property
    def complaint(self) -> str:
        """The first thing that was out of order; empty if nothing was."""
        is_missing = self._comes_before_hand_over and not self._calls_hand_over
        return "your sync never calls hand_over" if is_missing else self._complaint

    @property
    def is_offload_param(self) -> bool:
        """Whether parameters stay on the host between steps."""
        return self._is_offload_param

    @is_offload_param.setter
    def is_offload_param(self, value: object) -> None:
        # The check asks for the switch too: a sync that could set it would choose what it is checked for.
        self._complain("your sync changes is_offload_param, a switch of the job: only read it")

    def time(self) -> float:
        """Returns the seconds on the clock, as ``time.time()``."""
        self._num_reads += 1
        self._now += READ_SECONDS
        return self._now

    def synchronize(self) -> None:
        """Waits until the device has done what was asked of it, as ``torch.cuda.synchronize()``."""
        self._now = max(self._now, self._queue_ends)

    def load(self, load_grad: bool = True) -> None:
        """Asks for the weights, as verl's ``load_megatron_model_to_gpu``, whose default loads the gradients too."""
        if not self.is_offload_param:
            self._complain("your sync loads weights that are on the device: load only if is_offload_param is true")
        elif load_grad:
            self._complain(
                "your sync loads the gradients too, 4 bytes per parameter that it does not read: pass load_grad=False"
            )
        self._lab.load("parameters", *(["gradients"] if load_grad else []))
        self._copy("load")

    def hand_over(self) -> None:
        """Copies the weights from the device to the host for the engine, and waits for the copy."""
        self._calls_hand_over = True
        if self.is_offload_param and ("load" not in self._done or "offload" in self._done):
            self._complain(
                "hand_over comes while the weights are on the host, and it reads them on the device: load first"
            )
            return
        self._lab.hand_over()
        self._copy("hand over")
        self.synchronize()

    def broadcast(self) -> None:
        """Sends the copies on the host to the engine."""
        if "hand over" not in self._done:
            self._complain_of_order("broadcast comes before hand_over, whose copies it sends: hand over first")
        if self.is_offload_param and "offload" not in self._done:
            self._complain(
                "the weights stay on the device during the broadcast, which does not read them there: offload them "
                "right after hand_over"
            )
        self._done.append("broadcast")
        self._now += BROADCAST_SECONDS

    def offload(self) -> None:
        """Asks for the weights to leave the device."""
        if not self.is_offload_param:
            self._complain(
                "your sync offloads weights that stay on the device: offload only if is_offload_param is true"
            )
        elif "hand over" not in self._done:
            self._complain_of_order(
                "offload comes before hand_over, which reads the weights on the device: hand over first"
            )
        self._lab.offload("parameters", "gradients")
        self._copy("offload")

    def wrong_durations(self, answer: object) -> str:
        """Says what the sync has not done, or what is wrong with the seconds that it returned; empty if nothing is."""
        needed = [*(["load"] if self.is_offload_param else []), "hand over", "broadcast"]
        needed += ["offload"] if self.is_offload_param else []
        if missing := [name for name in needed if name not in self._done]:
            return f"your sync never calls {missing[0].replace(' ', '_')}"
        if twice := [name for name in needed if self._done.count(name) > 1]:
            return f"your sync calls {twice[0].replace(' ', '_')} twice, must call it once"
        try:
            # A text is no number, although float() reads it.
            given = list(answer)  # type: ignore[call-overload]  # whatever the reader's code gave
            seconds = [] if any(isinstance(each, str) for each in given) else [float(each) for each in given]
        except (TypeError, ValueError):
            seconds = []
        if len(seconds) != len(_DURATIONS):
            return f"your sync returns {answer!r}, must return two numbers: the seconds of the load and of the offload"
        if self._is_right(seconds[::-1]) and not self._is_right(seconds):
            return "your sync returns its two numbers in the wrong order, must be the load's and then the offload's"
        for name, mine in zip(_DURATIONS, seconds, strict=True):
            if problem := self._wrong_duration(name, mine):
                return problem
        return ""

    def _is_right(self, seconds: list[float]) -> bool:
        return not any(self._wrong_duration(*each) for each in zip(_DURATIONS, seconds, strict=True))

    def _wrong_duration(self, name: str, mine: float) -> str:
        if not self.is_offload_param:
            return f"the {name} took {mine:.3g} s although there was none, must be exactly 0.0" if mine != 0.0 else ""
        needed = CALL_SECONDS + self._copy_seconds(name)
        if math.isclose(mine, needed, rel_tol=_OF_READS):
            return ""
        if self._num_reads < _READS:
            why = f"read trainer.time() at both ends of both timers, {_READS} times: no other clock sees these copies"
        elif math.isclose(mine, needed - CALL_SECONDS, rel_tol=_OF_READS):
            why = "start the timer before the call, which takes time too, and do not round"
        elif mine < needed:
            why = "wait for the device first"
        elif math.isclose(mine, 1000 * needed, rel_tol=_OF_READS):
            why = "return seconds, not milliseconds"
        else:
            why = "the timer contains something else"
        return f"the {name} took {mine:.3g} s by your timer, and its copy {needed:.3g} s: {why}"

    def _copy(self, name: str) -> None:
        self._done.append(name)
        self._now += CALL_SECONDS
        self._queue_ends = max(self._queue_ends, self._now) + self._copy_seconds(name)

    def _copy_seconds(self, name: str) -> float:
        return self._slowness * COPY_SECONDS[name]

    def _complain_of_order(self, what: str) -> None:
        self._comes_before_hand_over |= not self._complaint
        self._complain(what)

    def _complain(self, what: str) -> None:
        self._complaint = self._complaint or what
