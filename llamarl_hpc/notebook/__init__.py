"""Runs from a notebook, or from any Python: load, change, submit, watch, read, stop, go on.

    experiment = Experiment.load("experiments/slurm.yaml", {"trainer.max_steps": 10})
    run = experiment.submit()        # a Slurm job; experiment.start() runs on this machine
    run.watch()                      # curves in the cell until the run ends
    run.rollouts(step=3)             # a pandas table
    Run.attach("700")                # from another kernel, by job id or folder

Nothing heavy is loaded before it is needed, and torch never. What can be mended is a ConfigError
of one sentence. No call uses an event loop, so all of them work inside Jupyter's.
"""

from llamarl_hpc.notebook.experiment import Experiment
from llamarl_hpc.notebook.run import Run

__all__ = ["Experiment", "Run"]
