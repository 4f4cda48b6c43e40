"""docs/images/architecture.svg: the way of a case, of a round and of a hospital request, room by room.

python docs/make_architecture_picture.py --write
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parent / "images" / "architecture.svg"
WIDTH, BOX, GAP, HEIGHT = 1180, 168, 26, 92

WAYS = [
    (
        "The way of a case: from a folder to a batch",
        "#2f6f8f",
        [
            ("data/readers", "find files,\nread formats"),
            ("data: federation", "clients, labels,\nsplits"),
            ("data/checking", "leave out\nwhat is broken"),
            ("data/preparing", "orient, resample,\nnormalise, cache"),
            ("data/serving", "patches, augment,\nmove to the GPU"),
            ("training", "Batch: the loss,\none step"),
        ],
    ),
    (
        "The way of a round: from the server's state to the next",
        "#7a4f9a",
        [
            ("engine/experiment", "who takes part,\nround t"),
            ("methods", "run_round:\nclients.ask('train')"),
            ("engine/transports", "loop, workers\nor hospitals"),
            ("engine/host", "the client's task:\nClient.fit"),
            ("clients/gate", "check every reply\nor refuse it"),
            ("aggregation", "weights, mean:\nstate t + 1"),
        ],
    ),
    (
        "The way of a hospital request: from the organiser to a site and back",
        "#9a5a2f",
        [
            ("deploy: remote", "one request\na hospital"),
            ("deploy: wire", "pack, hash,\nbound sizes"),
            ("deploy/rpc", "carry it, mutual\nTLS, no code"),
            ("deploy: rules", "site.yaml says\nyes or no"),
            ("deploy: site", "engine/host does\nthe task"),
            ("deploy: ledger", "write down what\nleaves, reply"),
        ],
    ),
]


def draw() -> str:
    rows = []
    for number, (title, colour, boxes) in enumerate(WAYS):
        top = 24 + number * 168
        rows.append(f'<text x="24" y="{top + 14}" class="title" fill="{colour}">{escape(title)}</text>')
        for place, (room, what) in enumerate(boxes):
            left, middle = 24 + place * (BOX + GAP), top + 30 + HEIGHT / 2
            rows.append(
                f'<rect x="{left}" y="{top + 30}" width="{BOX}" height="{HEIGHT}" rx="8" '
                f'fill="{colour}" fill-opacity="0.1" stroke="{colour}"/>'
            )
            rows.append(f'<text x="{left + 12}" y="{top + 56}" class="room">{escape(room)}</text>')
            for line, text in enumerate(what.split("\n")):
                rows.append(f'<text x="{left + 12}" y="{top + 80 + 18 * line}">{escape(text)}</text>')
            if place:
                rows.append(
                    f'<path d="M{left - GAP + 3} {middle} h{GAP - 10}" stroke="{colour}" stroke-width="2" '
                    f'marker-end="url(#tip{number})"/>'
                )
    tips = "".join(
        f'<marker id="tip{n}" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for n, (_, colour, _) in enumerate(WAYS)
    )
    height = 24 + len(WAYS) * 168 - 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape("; ".join(title for title, _, _ in WAYS))}">\n'
        "<style>text{font:14px system-ui,sans-serif;fill:#333}.title{font-size:17px;font-weight:600}"
        ".room{font-weight:600}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n<defs>{tips}</defs>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PICTURE.write_text(draw(), encoding="utf-8")
