"""Example cases: outlines of truth and prediction, and where the model was uncertain.

A case is one strip of grey slices and one of uncertainty, as pictures inside the page; outlines are SVG
paths, sharp at any size. A slider moves the strips and shows the outlines of one slice; without a script the
slice with most foreground is shown.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import contourpy
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wardround.engine.judging.pictures import Layer, Picture
from wardround.reporting.charts import format_number
from wardround.reporting.html import Html, name, plain, section, tag
from wardround.tables import shown

LEVELS = 24  # of uncertainty; few enough to stay small
JPEG_QUALITY = 82
BUDGET = 4_500_000  # bytes of all pictures on a page
SLICE_CHOICES = (24, 16, 12, 8, 5, 3, 1)


@dataclass(frozen=True)
class Encoded:
    """A case as it stands in the page: two strips as data addresses, and outlines for every slice."""

    picture: Picture
    scan: str
    uncertainty: str | None
    truth: Sequence[str]
    prediction: Sequence[str]

    @property
    def num_bytes(self) -> int:
        return len(self.scan) + len(self.uncertainty or "") + sum(map(len, (*self.truth, *self.prediction)))


Gallery = Mapping[str, Mapping[str, Sequence[Encoded]]]  # run -> client -> cases


def encode_all(
    pictures: Mapping[str, Mapping[str, Sequence[Picture]]], budget: int = BUDGET
) -> tuple[Gallery, int]:
    """All pictures of a page, with as many slices as fit; also how many slices a case has at most."""
    encoded: Gallery = {}
    for most in SLICE_CHOICES:
        encoded = {
            run: {
                client: [encode(reduce_slices(p, most)) for p in cases] for client, cases in clients.items()
            }
            for run, clients in pictures.items()
        }
        size = sum(e.num_bytes for clients in encoded.values() for cases in clients.values() for e in cases)
        if size <= budget:
            return encoded, most
    return encoded, SLICE_CHOICES[-1]


def reduce_slices(picture: Picture, most: int) -> Picture:
    """At most so many slices, the shown one among them."""
    number = len(picture.image)
    if number <= most:
        return picture
    kept = sorted({round(step * (number - 1) / max(1, most - 1)) for step in range(most)})
    kept[min(range(len(kept)), key=lambda step: abs(kept[step] - picture.shown))] = picture.shown
    places = [picture.places[index] for index in kept]
    return dataclasses.replace(
        picture,
        image=picture.image[kept],
        truth=picture.truth[kept],
        prediction=picture.prediction[kept],
        uncertainty=None if picture.uncertainty is None else picture.uncertainty[kept],
        places=places,
        shown=kept.index(picture.shown),
    )


def encode(picture: Picture) -> Encoded:
    uncertainty = picture.uncertainty
    return Encoded(
        picture,
        encode_data_url(strip(picture.image), "JPEG"),
        None if uncertainty is None else encode_data_url(colour(strip(uncertainty)), "PNG"),
        [trace_outlines(labels) for labels in picture.truth],
        [trace_outlines(labels) for labels in picture.prediction],
    )


def strip(layer: Layer) -> Layer:
    """All slices below each other."""
    return layer.reshape(-1, *layer.shape[2:])


def colour(values: Layer, palette: str = "magma") -> Image.Image:
    """Values in a few colours from dark to bright, readable without colour too."""
    import matplotlib

    table = matplotlib.colormaps[palette](np.linspace(0, 1, LEVELS))[:, :3]
    picture = Image.fromarray((values.astype(np.uint16) * (LEVELS - 1) // 255).astype(np.uint8))
    picture = picture.convert("P")
    picture.putpalette((255 * table).astype(np.uint8).tobytes())
    return picture


def encode_data_url(picture: Layer | Image.Image, kind: str) -> str:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    content = io.BytesIO()
    image.save(content, kind, optimize=True, **({"quality": JPEG_QUALITY} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def trace_outlines(labels: NDArray[np.uint8]) -> str:
    """The borders of every class as one SVG path, in pixels.

    >>> trace_outlines(np.array([[0, 0], [0, 1]], dtype=np.uint8))
    'M1 1.5l.5 -.5l.5 .5l-.5 .5l-.5 -.5z'
    """
    padded = np.pad(labels, 1)
    paths = []
    for value in np.unique(labels[labels > 0]):
        found = contourpy.contour_generator(z=(padded == value).astype(float)).lines(0.5)
        paths += [trace_path(np.asarray(line) - 0.5) for line in found]
    return "".join(paths)


def trace_path(corners: NDArray[np.float64]) -> str:
    """Relative steps; straight runs are joined."""
    steps = np.diff(corners, axis=0)
    joined: list[NDArray[np.float64]] = []
    for step in steps:
        if joined and abs(joined[-1][0] * step[1] - joined[-1][1] * step[0]) < 1e-9 and joined[-1] @ step > 0:
            joined[-1] = joined[-1] + step
        else:
            joined.append(step)
    written = "".join(f"l{format_coordinate(x)} {format_coordinate(y)}" for x, y in joined)
    return f"M{format_coordinate(corners[0][0])} {format_coordinate(corners[0][1])}{written}z"


def format_coordinate(value: float) -> str:
    text = f"{value:.1f}".rstrip("0").rstrip(".")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text or "0"


# On the page


def gallery(
    identifier: str, encoded: Mapping[str, Sequence[Encoded]], *, temperature: float = math.nan
) -> Html:
    """Best, median and worst case of every client. temperature: what predict uses, and pictures do not."""
    blocks = []
    for client, cases in encoded.items():
        if cases:
            figures = tag("div", [case_figure(client, entry) for entry in cases], class_="cases")
            blocks.append(tag("div", tag("h4", name(client)), figures, class_="client-cases"))
    if not blocks:
        return Html("")
    lead = (
        "The best, the median and the worst test case of every client by Dice. Left: the scan; right: the "
        "uncertainty of the model (entropy of its prediction as trained, dark is confident). Structures that "
        "a client does not annotate are not outlined."
    )
    if any(entry.picture.plane for cases in encoded.values() for entry in cases):
        lead += (
            " Volumes: slices of the plane with the finest pixels, in the aspect of millimetres, the "
            "patient's right on the left."
        )
    if math.isfinite(temperature) and temperature != 1:
        lead += (
            f" Entropy maps of predict use the run's temperature, {format_number(temperature)}; these do not."
        )
    return section(identifier, "Example cases", draw_keys(), *blocks, level=3, lead=lead)


def draw_keys() -> Html:
    """What the outlines mean; the boxes show and hide them."""
    boxes = [
        tag(
            "label",
            tag("input", type="checkbox", checked=True, data_outline=kind),
            tag("svg", tag("line", x1="1", x2="21", y1="6", y2="6", class_=f"outline {kind}"), width="22",
                height="12", aria_hidden="true"),
            words,
        )
        for kind, words in (("truth", "truth"), ("prediction", "prediction"))
    ]  # fmt: skip
    bar = tag("span", class_="scale", aria_hidden="true")
    scale = tag("span", "confident 0", bar, "1 even guess", class_="scale-key")
    return tag("div", boxes, scale, class_="keys")


def case_figure(client: str, entry: Encoded) -> Html:
    picture = entry.picture
    kind = f"{picture.kind}: " if picture.kind else ""
    dice = "" if math.isnan(picture.dice) else f", Dice {shown(picture.dice)}"
    words = f"{kind}{plain(picture.name)} of {plain(client)}{dice}"
    panels = [
        panel(
            entry, entry.scan, ("truth", "prediction"), f"Scan with outlines of truth and prediction; {words}"
        ),
        panel(entry, entry.uncertainty, ("prediction",), f"Where the model was uncertain; {words}")
        if entry.uncertainty is not None
        else tag("p", "This run kept no uncertainty.", class_="absent"),
    ]
    is_one = bool(picture.plane) and len(picture.image) == 1  # without a slider, which names the plane
    caption = tag(
        "figcaption",
        tag("span", picture.kind, class_=f"kind {picture.kind}") if picture.kind else None,
        tag("span", name(picture.name, 28), f", {picture.plane}" if is_one else None, class_="case-name"),
        None if math.isnan(picture.dice) else tag("span", f"Dice {shown(picture.dice)}", class_="case-score"),
    )
    return tag("figure", tag("div", panels, class_="panels"), slider(picture, words), caption, class_="case")


def panel(entry: Encoded, strip_address: str, kinds: Sequence[str], words: str) -> Html:
    """One slice of a strip, with the outlines that belong to it."""
    picture = entry.picture
    height, width = picture.size
    groups = [
        tag(
            "g",
            [
                [tag("path", d=getattr(entry, kind)[index], class_=f"casing {kind}"),
                 tag("path", d=getattr(entry, kind)[index], class_=f"outline {kind}")]
                for kind in kinds if getattr(entry, kind)[index]
            ],
            class_="slice" if index == picture.shown else "slice off",
        )
        for index in range(len(picture.image))
    ]  # fmt: skip
    strip_image = tag(
        "image", href=strip_address, x="0", y=str(-picture.shown * height), width=str(width),
        height=str(height * len(picture.image)), preserveAspectRatio="none", class_="strip-image",
    )  # fmt: skip
    tall = height * picture.aspect
    inner = tag(
        "svg", strip_image, groups, viewBox=f"0 0 {width} {height}", width=str(width), height=f"{tall:g}",
        preserveAspectRatio="none",
    )  # fmt: skip
    return tag("svg", inner, viewBox=f"0 0 {width} {tall:g}", role="img", aria_label=words, class_="scan")


def slider(picture: Picture, words: str) -> Html | None:
    """Moves through the slices of a volume."""
    if len(picture.image) < 2:
        return None
    what = f"{picture.plane} slice".strip()
    where = f"{what} {picture.places[picture.shown] + 1} of {picture.depth}"
    places = ",".join(str(place + 1) for place in picture.places)
    return tag(
        "div",
        tag(
            "input", type="range", min="0", max=str(len(picture.image) - 1), value=str(picture.shown),
            step="1", aria_label=f"Slice of {words}", data_places=places,
            aria_valuetext=where,
        ),
        tag("output", where, data_depth=picture.depth, data_what=what),
        class_="slider",
    )  # fmt: skip
