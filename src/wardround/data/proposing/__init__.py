"""Proposing: `wardround data init`, a federation.yaml for folders nobody has described yet.

proposal  opens a few files of every client, then chooses every setting with its reason: `propose`, `describe`
"""
