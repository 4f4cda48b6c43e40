"""Proposing: `wardround data init`, a federation.yaml for folders nobody has described yet.

inspection  open a few files of every client: channels, sizes, spacings, label values
proposal    choose every setting from that, each with its reason: `propose`, `describe`
"""
