"""What every process of a search needs, imported by the server that forks them, or by the first call of an engine.

The servers are those of `memlab.ranks.local_processes` and `memlab.ranks.fork_server`.
"""

from memlab.quiet_import import imported

for name in ("memlab.lab.lab", "memlab.backends.simulated"):
    imported(name)
Predictor = imported("memlab.lab.search_steps").Predictor
