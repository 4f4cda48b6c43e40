"""Limits on everything that comes from another party, and why each is where it is.

They bound the memory and the time that a message can cost before it is trusted; every one is far above what
the methods of this project send. This module imports nothing, so that a process without PyTorch can read it.
"""

from __future__ import annotations

# A message's header, which is JSON

HEADER_CHARACTERS = 64 * 2**20  # the scores of some 100,000 cases, by far the longest honest header
ITEMS = 2_000_000  # commas, colons and brackets in it: an empty list needs 20 times its text in memory
DEPTH = 50  # levels of nesting; a run's configuration has fewer than ten
TEXT = 2**17  # characters of one text; names and reasons have a line, a settings file a few pages
INTEGER = 2**64  # a whole number is smaller: Python's own have no end, and thousands of digits cost seconds

# Its tensors

TENSORS = 100_000  # FedLAW sends the models of all hospitals in one request: 100 of 1,000 tensors
AXES = 8  # of a tensor; weights of a 3D convolution have five
SIDE = 2**31  # length of an axis
NUMBERS = 2**34  # in a tensor; sides are multiplied only after these three hold

# A reply

REPLY_BYTES = 4 * 2**30  # whatever was registered; large networks have 1 GiB
REPLY_MODELS = 5  # a reply to "train", in models as registered: one, and what a method adds (SCAFFOLD: one)
EXTRAS_BYTES = 64 * 2**20  # and beyond that: FedProto's means and counts, whatever the size of the model
SURVEY_BYTES = 8 * 2**20  # an answer to a survey: a fingerprint of at most 4 MiB, and what the files say
CASES = 10**7  # of a hospital, in registrations and counts; none has more scans
STEPS = 10**9  # of local training in one round
SECONDS = 10**8  # of a task: three years
LOSS_TERMS = 1000  # of a training loss; losses have fewer than ten
FILTERS = 20  # of an answer, as a hospital tells them; there are two
ROUNDS = 2**31  # a number beyond is no round

# What a run remembers of replies

STRAYS = 1000  # unexpected ones, until its records take them
CLOSED_LETTERS = 10_000  # so that a late reply can be named
REASON = 2000  # characters of a hospital's own words that are kept

# The network channel

CONNECTIONS = 500  # to the server, below the usual 1,024 descriptors of a process; a hospital needs one
HANDSHAKE_SECONDS = 5  # for a connection to prove who it is
IDLE_SECONDS = 60  # without a call, before a connection is closed; a hospital calls every two seconds
CALLS = 300  # at the same time, each in a thread
CALLS_OF_ONE = 6  # hospital; an honest one has three
STREAMS = 16  # calls of one connection
METADATA_BYTES = 4096  # of a call, 40 are used
INFO_BYTES = 10_000  # of the few fields beside a message
PIECE_BYTES = 2**20  # of a message that are taken at once
CHUNK_BYTES = 2**18  # in which a message travels; what a broken connection loses, two seconds at 1 Mbit/s
STALL_SECONDS = 30  # without a piece of a reply, before its call is ended; the hospital goes on with another
SLOT_SECONDS = 60  # for which a hospital may have the turn to send a large reply over FLARE to itself
KNOWN = 4  # models that a hospital says it has from requests before
HELD = 100  # requests that a hospital says it works on
JOBS = 1000  # runs that a server says are in progress

# Files between organiser and hospitals that go by mail

LETTER_BYTES = 30_000  # an invitation, a signing request, a certificate; honest ones have some 6,000
KEY_BITS = (2048, 4096)  # of a hospital's key; verifying with a longer one takes seconds
REVOCATION_BYTES = 2**20  # of the list of revoked certificates: some 20,000 of them
