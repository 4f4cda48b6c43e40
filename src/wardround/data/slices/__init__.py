"""Slices: volumes for 2D networks.

view     `Slices`: a volume as 2D slices along one axis, and the way back
cutting  `cut`: a federation of slices from one of volumes (`wardround data slices`)
"""
