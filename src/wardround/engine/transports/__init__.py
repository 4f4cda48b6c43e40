"""Where a run's clients are on this machine: in this process or in worker processes.

`placement.place` decides, `local.open_transport` opens. Hospitals have a transport of their own (`deploy`).
"""
