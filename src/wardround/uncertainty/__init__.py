"""Uncertainty: how confident a model is, voxel by voxel and case by case, and whether it is right to be.

maps                     uncertainty of one scan, from one or several passes, or from a Dirichlet
calibration, temperature how far probabilities can be trusted, and one temperature that corrects them
quality, histogram       whether uncertainty finds errors; quantiles over clients without single values
"""
