"""Prediction: from a run folder and a scan to a mask in the scan's own geometry.

trained              the model of a run, from its folder alone
inputs               files, folders, DICOM series and lists -> scans
windows              sliding windows over scans that are too large for the network
predicting, results  one scan: read, prepare, predict, back to its own grid
writing              masks and maps as files
session              many scans into one folder; `predict` for Python
evaluating           any model on any labelled set (labelled), without cases it has seen
"""
