"""Facts: what the rules of the configuration know of a federation.

They are joined from the clients' fingerprints, which hold counts and histograms and no value of one case.
Axes are those of prepared scans (after `prepare.orientation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wardround.data.fingerprint.case import Modality
from wardround.data.fingerprint.positions import PairPosition


@dataclass(frozen=True)
class Quantiles:
    """Values of the cases: the 10th percentile, the median and the 90th percentile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class ChannelFacts:
    """One channel, with the intensities of its labelled voxels over all clients."""

    name: str
    modality: Modality
    mean: float
    sd: float
    percentile_00_5: float
    percentile_99_5: float


@dataclass(frozen=True)
class ClientFacts:
    """One client: its training cases, and what it computes with.

    num_train: at least so many where is_open is False: it has too few patients to tell; memory: bytes of its
    GPU, or of the machine; modality: of each channel, by its values alone, so never "mr"; None
    for one that it lacks; num_unlabelled: training cases without a label; annotates: classes or regions,
    empty where it annotates everything.
    """

    name: str
    num_train: int
    device: Literal["cuda", "cpu"]
    memory: int
    cores: int
    modality: tuple[Modality | None, ...] = ()
    is_open: bool = True
    num_unlabelled: int = 0
    annotates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What is known of all cases together.

    dimensions: of the files; classes: without the background; regions: class numbers joined under a name;
    has_spacing: whether files say millimetres; spacing: millimetres a voxel, shape: voxels after cropping to
    what is not empty, extent: the same in millimetres, each along every axis; kept: median share of the
    voxels that cropping leaves; presence: class -> share of the cases that have it; sizes: class -> share of
    the cropped image that it takes, where it is present; foreground_extent: millimetres of the box around all
    classes, along every axis; positions: of pairs of classes to each other; notes: what was guessed, and who
    could not be measured, a sentence each.
    """

    dimensions: Literal[2, 3]
    channels: tuple[ChannelFacts, ...]
    classes: tuple[str, ...]
    regions: Mapping[str, tuple[int, ...]]
    has_spacing: bool
    spacing: tuple[Quantiles, ...]
    shape: tuple[Quantiles, ...]
    extent: tuple[Quantiles, ...]
    kept: float
    presence: Mapping[str, float]
    sizes: Mapping[str, Quantiles]
    clients: tuple[ClientFacts, ...]
    foreground_extent: tuple[Quantiles, ...] = ()
    positions: tuple[PairPosition, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_train(self) -> int:
        return sum(client.num_train for client in self.clients)

    @property
    def partial(self) -> ClientFacts | None:
        """The first client that annotates some classes only; None where all annotate everything."""
        return next((client for client in self.clients if client.annotates), None)
