"""What `memlab.watch` yields: the record of a block that shows itself in a notebook."""

from __future__ import annotations

from memlab.record.watch_record import WatchRecord
from memlab.views.display import View, show
from memlab.views.figures.resample import Axis
from memlab.views.text.watch import watch_table


class Run(WatchRecord):
    """The record of a watched block. As the last expression of a cell it is a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if self.timeline is None:
            return f"the watched block '{self.name}', which has not ended"
        return watch_table(self)

    def show(self, pool: str = "device", axis: Axis = "time", *, above_start: bool = False) -> View:
        """Shows the timeline and the table; `memlab.show` describes the arguments."""
        return show(self, pool=pool, axis=axis, above_start=above_start)
