"""Phantom: synthetic hospitals, so that everything runs without patient data.

cases      `PhantomSettings`, `make_client`: the cases of each hospital in memory
scans      the style of each hospital; one head, its lesions, its image and label
files      `write`: the same cases as folders of NIfTI or PNG files
"""
