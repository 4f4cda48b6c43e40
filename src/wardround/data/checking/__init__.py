"""Checking: which cases can be used, and how the clients differ.

check.check            opens every case: `wardround data check`
check.check_quickly    without opening an image; check.assign_splits gives every case its split
findings.CheckReport   what was found, and the cases that remain
facts, cross_case      what a file holds; comparisons between cases and clients
"""
