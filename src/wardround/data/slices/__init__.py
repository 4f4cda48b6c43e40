"""Slices: volumes for 2D networks.

cutting  `Slices`, a volume as 2D slices along one axis and the way back; `cut`, a federation of slices from
         one of volumes (`wardround data slices`)
"""
