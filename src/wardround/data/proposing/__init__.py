"""Proposing: `wardround data init`, a federation.yaml for folders nobody has described yet.

proposal    chooses every setting with its reason, from a few files of every client: `propose`, `describe`
codings     what colours of masks and names of mask files mean; label_maps: values that differ between clients
"""
