"""Preparing: from the files of a case to the tensors a network reads, made once and cached on disk.

prepare  one case: reorient, crop, resample, normalise, pad; `geometry` knows the way back
grid     shape and spacing beforehand, without torch
cache    prepared cases on disk: one safetensors file each, and the folder of them
pool     many cases on all cores: `prepare_cases`
record   `Preparation`: what was done to the scans of a run, kept with its model
"""
