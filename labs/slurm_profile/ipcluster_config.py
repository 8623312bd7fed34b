"""An ipyparallel profile for Slurm: the controller on this node, one engine per GPU in a batch job.

Copy it with its neighbour into a folder ``profile_slurm`` of ~/.ipython, and change the lines marked "yours".
https://ipyparallel.readthedocs.io/en/latest/reference/launchers.html
"""

from pathlib import Path

c = get_config()  # noqa: F821  # ipyparallel gives it to the file
c.Cluster.engine_launcher_class = "slurm"
c.Cluster.controller_launcher_class = "local"  # "slurm" starts the controller as a job, too
# Engines on other nodes have to reach the controller; ipyparallel's default is 127.0.0.1.
c.Cluster.controller_ip = "*"
# By default the controller keeps up to 1 GiB of answers. (ipcluster 9.2 ignores c.Cluster.controller_args.)
c.LocalControllerLauncher.controller_args = ["--nodb"]
c.SlurmEngineSetLauncher.batch_template_file = str(Path(__file__).with_name("engines.sbatch"))
c.SlurmEngineSetLauncher.namespace = {"gpus_per_node": 8}  # yours
