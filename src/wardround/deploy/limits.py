"""Limits on everything that comes from another party, and why each is where it is.

They bound the memory and time that a message can cost before it is trusted. This module imports nothing, so
that the process with the network port can read it without PyTorch.
"""

from __future__ import annotations

# A message's header, which is JSON

HEADER_CHARACTERS = 64 * 2**20  # the scores of about 100,000 cases, by far the longest honest header
DEPTH = 50  # levels of nesting; a run's configuration has fewer than ten

# Its tensors

AXES = 64  # as many as NumPy has

# A reply, and what a hospital says of itself

REPLY_BYTES = 4 * 2**30  # as much as a reply may have whatever was registered; large networks have 1 GiB
CASES = 10**7  # no hospital has more scans
LOSS_TERMS = 1000  # of a training loss; losses have fewer than ten

# What is kept between two looks

STRAYS = 1000  # unexpected replies, kept until the run's records take them
CLOSED_LETTERS = 10_000  # so that a late reply can be named
ROUNDS = 2**31  # of a run; a number beyond is no round
