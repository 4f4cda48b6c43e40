"""Where a run's clients are on this machine: in this process or in worker processes.

`placement.place` decides, `opening.open_transport` opens. Hospitals have a transport of their own (`deploy`).
"""
