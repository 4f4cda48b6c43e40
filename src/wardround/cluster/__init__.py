"""Runs as jobs of a cluster that exists already: SLURM through submitit, or Ray.

options.py (`open_cluster`) checks what was asked for and opens slurm.py or ray.py; jobs.py (`ClusterJobs`) is
the engine that `batch` hands its runs to; cell.py is the process that does one of them on a node. All that an
engine carries is a command line; requests and answers are files in a folder that every node sees.
"""
