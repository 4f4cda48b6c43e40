"""A secure sum by phase, in one process on one core, against adding the plain float32 vectors.

    python benchmarks/privacy/secure_sum.py
    python benchmarks/privacy/secure_sum.py --values 1900000 --repeats 3 --json

Seconds are of the processor, the median over the repetitions; "members" are all of them together, "server,
one lost" is when one is lost after it shared its keys. `ratio`: all members and the server, as in a
simulation on one core, over the plain sum. Beside a round of training, the seconds count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from wardround.privacy.secure_sum import Coordinator, FixedPoint, LocalIdentity, Member

CONTEXT, BINDING = b"benchmark", b"weights"
Seconds = dict[str, float]


@contextmanager
def timed(seconds: Seconds, phase: str) -> Iterator[None]:
    started = time.process_time()
    yield
    seconds[phase] += time.process_time() - started


def add_plainly(vectors: dict[str, np.ndarray]) -> np.ndarray:
    total = np.zeros(len(next(iter(vectors.values()))), np.float32)
    for vector in vectors.values():
        np.add(total, vector, out=total)
    return total


def add_securely(vectors: dict[str, np.ndarray], lost: int, seconds: Seconds) -> tuple[np.ndarray, int]:
    """The sum of those who are not lost, and the bytes that travelled beside the vectors."""
    names, sent, threshold = list(vectors), 0, len(vectors) // 2 + 1
    fixed, identities = FixedPoint(2.0**-20), {name: LocalIdentity() for name in names}
    with timed(seconds, "members: keys and shares"):
        members = {
            name: Member(name, context=CONTEXT, identity=identities[name], threshold=threshold)
            for name in names
        }
        adverts = {name: member.advertise() for name, member in members.items()}
        shares = {name: member.share(adverts) for name, member in members.items()}
    with timed(seconds, "server"):
        server = Coordinator(CONTEXT, threshold, len(vectors[names[0]]), identity=LocalIdentity())
        for name in names:
            server.add_advert(name, adverts[name])
        server.adverts()
        for name in names:
            server.add_shares(name, shares[name])
        server.begin(BINDING)
    left = names[lost:]
    for name in left:
        with timed(seconds, "members: fixed point"):
            coded = fixed.encode(vectors[name])
        with timed(seconds, "members: masks"):
            masked = members[name].mask(coded, server.shares_for(name), binding=BINDING)
        with timed(seconds, "server"):
            server.add_masked(name, masked)
    with timed(seconds, "members: unmasking"):
        signed = {name: members[name].confirm(left) for name in left}
        replies = {name: members[name].unmask(signed) for name in left}
    with timed(seconds, "server"):
        server.survivors()
        for name in left:
            server.add_confirmation(name, signed[name])
        server.confirmations()
        for name in left:
            server.add_unmasked(name, replies[name])
        total = fixed.decode(server.total())
    down = [{name: server.shares_for(name) for name in left}, [adverts] * len(names), [signed] * len(left)]
    for messages in (adverts, shares, signed, replies, *down):
        sent += len(json.dumps(messages))
    return total, sent


def measure(values: int, members: int, repeats: int) -> dict[str, float]:
    draws = np.random.default_rng(0)
    vectors = {f"hospital-{i}": draws.normal(size=values).astype(np.float32) for i in range(members)}
    runs: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for lost in (0, 1):
            seconds: Seconds = defaultdict(float)
            total, sent = add_securely(vectors, lost, seconds)
            with timed(seconds, "plain"):
                expected = add_plainly(dict(list(vectors.items())[lost:]))
            assert np.allclose(total, expected, atol=1e-4)
            if not repeat:
                continue
            for phase, found in seconds.items():
                if not lost or phase == "server":
                    runs[phase + (", one lost" if lost else "")].append(found)
            if not lost:
                runs["bytes beside the vectors"].append(sent)
    result = {phase: statistics.median(found) for phase, found in runs.items()}
    together = sum(found for phase, found in result.items() if phase.startswith("members")) + result["server"]
    result["one member"] = (together - result["server"]) / members
    result["bytes of a vector"] = 4 * values
    return result | {"together": together, "ratio": together / result["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=int, nargs="+", default=[1_900_000, 19_000_000])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {values: measure(values, options.members, options.repeats) for values in options.values}
    if options.json:
        largest = found[max(found)]
        print(json.dumps({"ratio": largest["ratio"], "by_values": found}))
        return
    print(f"| {options.members} members | {' | '.join(f'{values:,} values' for values in found)} |")
    print("|---" * (1 + len(found)) + "|")
    for row in found[options.values[0]]:
        cells = (
            f"{one[row]:,.0f}" if row.startswith("bytes") else f"{one[row]:.3f}" for one in found.values()
        )
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
