"""Runs one configuration: `experiment.Experiment` loops over rounds in a `run_folder.RunFolder`.

A `host.Host` does the clients' tasks, wherever they are (`transports/`); `judging/` scores the models.
"""
