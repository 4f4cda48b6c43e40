"""Names of clients that are not hospitals."""

POOLED = "pooled"  # the pseudo-client of the centralised reference
PROXY = "proxy"  # the server's own labelled cases, where a method needs some
NOT_HOSPITALS = frozenset({POOLED, PROXY})
