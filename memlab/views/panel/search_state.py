"""The panel's search as state: the memory limit, the running search, its result, and what the user takes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import traitlets

from memlab.config.backend_kind import KINDS
from memlab.config.settings import KEPT_ON_HOST, MemorySettings
from memlab.fitting.pareto_front import SearchResult, default_resolution_bytes
from memlab.lab.background_search import BackgroundSearch
from memlab.units import GIB, format_bytes, parse_bytes
from memlab.views.panel.state import LabState
from memlab.views.panel.what_if import WhatIf

_logger = logging.getLogger(__name__)
_USUAL_LIMIT_BYTES = 76 * GIB
_SHARE_OF_PEAK = 0.9
"""Of the shown run's peak: a limit that this run exceeds a little."""

_CLICK = "Click a row of a table, or a point of the chart"

_KEPT = (*KEPT_ON_HOST, "checkpoint_input_remedy")


class SearchState(traitlets.HasTraits):
    """A search next to a lab: it steps simulated labs of the same scenario, in processes of their own.

    Args:
        state: The panel's state; settings taken from the front go into its form.
        what_if: Without a run, the proposed limit is a share of the peak that it has predicted.
    """

    is_open = traitlets.Bool()
    limit = traitlets.Unicode()
    """Device memory for torch, as the user typed it."""
    busy = traitlets.Bool()
    notice = traitlets.Unicode()
    """Progress of the search, or how the last one ended, in words."""
    limit_source = traitlets.Unicode()
    """Where the proposed limit comes from; empty after the user has typed another."""
    alone = traitlets.Bool()
    """Whether the search that was started last predicts each setting alone, without combinations."""
    found = traitlets.Instance(SearchResult, allow_none=True)

    def __init__(
        self, state: LabState, start_search: Callable[..., Any] = BackgroundSearch, *, what_if: WhatIf | None = None
    ) -> None:
        super().__init__()
        self._state = state
        self._what_if = what_if
        self._start_search = start_search
        self._search: Any = None
        self.lock = state.lock
        self.observe(lambda _: self._propose_limit(), names=["is_open"])
        state.observe(lambda _: self._propose_limit(), names=["shown"])
        if what_if is not None:
            what_if.observe(lambda _: self._propose_limit(), names=["predicted"])

    @property
    def backend(self) -> str:
        """Whose steps are predicted: the ``cpu``'s next to a lab on a CPU, so that they compare with its runs."""
        name = self._state.lab.backend.name
        return "simulated" if KINDS[name].has_allocator else name

    def _propose_limit(self) -> None:
        """Proposes a limit, until the user has entered one or a search has used it."""
        is_fixed = self.busy or self.found is not None or (self.limit and not self.limit_source)
        if not self.is_open or is_fixed:
            return
        shown = self._state.shown
        measured = shown.record if shown is not None and shown.is_ok else None
        predicted = self._what_if.predicted if self._what_if is not None else None
        if device_limit := self._state.lab.device_memory_bytes:
            proposed, source = device_limit, "the device's memory"
        elif measured is not None:
            assert shown is not None
            proposed = int(measured.peak_allocated_bytes * _SHARE_OF_PEAK)
            source = f"{_SHARE_OF_PEAK:.0%} of the peak of run {shown.number}"
        elif predicted is not None:
            proposed = int(predicted.peak_allocated_bytes * _SHARE_OF_PEAK)
            source = f"{_SHARE_OF_PEAK:.0%} of the peak that is predicted for the controls"
        else:
            proposed, source = _USUAL_LIMIT_BYTES, "what torch can usually hold of a GPU's 80 GB in a job of one rank"
        self.limit = format_bytes(proposed)
        self.limit_source = source

    @traitlets.observe("limit")
    def _forget_source(self, _change: object) -> None:
        self.limit_source = ""

    @property
    def base(self) -> MemorySettings:
        """What every setting of a search keeps: the form's offload between steps, and its remedy.

        Raises:
            ValueError: If they break a rule.
        """
        form = self._state.form
        return MemorySettings(**{name: form.values[name] for name in _KEPT})

    @property
    def kept(self) -> str:
        """What a search takes from the controls and does not change, in words."""
        form = self._state.form
        try:
            base, state = self.base, form.state
        except ValueError as error:
            return f"{error}"
        tokens, batch = form.values["seq_length"], form.values["micro_batch_size"]
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        settings = [] if base == MemorySettings() else [f"{base}"]
        trained = [f"{state}"] if state.changed() else []
        return "; ".join([f"{sequences} of {tokens} tokens in a micro-batch", *settings, *trained])

    def start(self, *, alone: bool = False) -> None:
        """Starts a search from the form's workload, or says in `notice` why not.

        All settings keep the form's offload between steps and its remedy for checkpoints' inputs.

        Args:
            alone: Predicts each setting alone; else combinations too.
        """
        with self._state.lock:
            if self.busy:
                self.notice = "A search is running: wait for it, or stop it."
                return
            form = self._state.form
            try:
                limit_bytes = parse_bytes(self.limit)
                scenario = self._state.of_worst_rank(form.scenario(self._state.lab.scenario_as_opened))
                self._search = self._start_search(
                    scenario,
                    self.base,
                    limit_bytes,
                    resolution_bytes=default_resolution_bytes(limit_bytes),
                    alone=alone,
                    backend=self.backend,
                    on_line=self._say,
                    on_end=self._finish,
                )
            except (ValueError, OSError) as error:
                self.notice = f"Not searched: {error}"
                return
            only = f" (only rank {scenario.layout.rank})" if scenario.layout.world_size > 1 else ""
            self.alone = alone
            self.busy, self.notice = True, f"Searching: {scenario}{only}. The first prediction takes a few seconds."

    def stop(self) -> None:
        """Ends the running search."""
        if self.busy and self._search is not None:
            self._search.stop()

    def take(self, number: int | None) -> None:
        """Puts a point's settings into the controls, so that Run takes a step with them.

        Args:
            number: Index into the points that were found; None if they have been replaced since the user's click.
        """
        with self._state.lock:
            if self.found is None:
                self.notice = "There is no search result: press What saves most?, or Combinations, first."
                return
            if number is None:
                self._state.notice = "Another search ended before your click arrived: click again."
                return
            self._state.take_settings(self.found.points[number].settings)

    def observe_form(self, changed: Callable[[], None]) -> None:
        """Calls a function after each change of the controls, of which a search keeps some."""
        self._state.observe(lambda _: changed(), names=["form"])

    def _say(self, line: str) -> None:
        with self._state.lock:
            self.notice = line

    def _finish(self, outcome: SearchResult | str) -> None:
        with self._state.lock:
            self.busy = False
            if isinstance(outcome, str):
                _logger.info("a search ended without a result: %s", outcome)
                self.notice = outcome
                return
            self.found = outcome
            left = outcome.num_left
            if self.alone:
                number = len(outcome.points)
                predicted = f"{number} settings predicted: '{outcome.base}', and each change to it alone"
                if left:
                    predicted = (
                        f"Ended early: {number} settings predicted ('{outcome.base}', or one change to it), {left} not"
                    )
                self.notice = f"{predicted}. {_CLICK}, to put its settings into the controls."
                return
            early = f"Ended early: {left} settings are not predicted. " if left else ""
            count = len(outcome.cheapest)
            are = "is the cheapest that fits" if count == 1 else "are the cheapest that fit"
            cheapest = f"{count} of them {are} (every other that fits recomputes or transfers more)"
            on_front = "1 setting is" if len(outcome.front) == 1 else f"{len(outcome.front)} settings are"
            front = f"{on_front} on the front (no other setting is at least as good in peak, recompute and copies)"
            fit = cheapest if count else "none of them fits"
            self.notice = f"{early}{front}; {fit}. {_CLICK}, to put its settings into the controls."
