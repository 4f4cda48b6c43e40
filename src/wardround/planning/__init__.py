"""Planning: what a run will take, before it is started. `plan.make_plan` is the way in.

costs     estimates from the configuration: steps, memory by device, traffic, disk, time
dry_run   two rounds on random cases, which measure what can be measured
"""
