"""Imports what every process of a search needs, for the server that forks them (`memlab.ranks.local_processes`)."""

from memlab.quiet_import import imported

for name in ("memlab.lab.lab", "memlab.lab.search_steps", "memlab.backends.simulated"):
    imported(name)
