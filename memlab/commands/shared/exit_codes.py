"""The exit code by which a script tells a verdict."""

from __future__ import annotations

from memlab.fitting.does_it_fit import Verdict

EXIT_CODES: dict[Verdict, int] = {"fits": 0, "does not fit": 1, "may fit": 3}
"""2 says that the input was bad, as argparse has it."""
