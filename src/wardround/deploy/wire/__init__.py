"""A message on its way between organiser and hospital: a JSON header, numeric arrays, one SHA-256 over both.

`pack` makes a parcel; `unpack` trusts nothing in one: it checks address, size, names, shapes, types and
SHA-256 first, and says what is wrong in a `ParcelError` of one sentence. Only numbers, text, lists and
dictionaries can travel, so there is nothing to execute.
"""

from wardround.deploy.wire.packing import Parcel, ParcelError, pack
from wardround.deploy.wire.unpacking import unpack

__all__ = ["Parcel", "ParcelError", "pack", "unpack"]
