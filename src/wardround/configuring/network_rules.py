"""Rules of the network: patch, poolings, kernels, widths and batch size, from shapes, spacing and memory.

The rules are nnU-Net's (Isensee et al., Nature Methods 2021; `ExperimentPlanner` of nnU-Net 2.8.1), written
anew; golden results of nnU-Net itself are in the tests. Ours are: what a smallest client or a client without
a GPU does to them, at least two levels and at most ten, and a refusal where nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wardround.configuring.facts import ClientFacts, Facts
from wardround.errors import ConfigError
from wardround.text import format_bytes, format_size

Sides = tuple[int, ...]

SMALLEST_MAP = 4  # voxels that a side keeps at the deepest level
START_SIDE = {2: 2048, 3: 256}  # of a cube (square) with the volume of the first patch
MOST_LEVELS = 10  # of `model.levels`
BASE_FILTERS = 32
MOST_FILTERS = {2: 512, 3: 320}
SMALLEST_BATCH = 2
MOST_COVERED = 0.05  # share of all training voxels in one batch

REFERENCE_UNITS = {2: 85_000_000, 3: 560_000_000}  # of a network that fits REFERENCE_MEMORY
REFERENCE_BATCH = {2: 12, 3: 2}  # with so many images
REFERENCE_MEMORY = 8 * 10**9
MEMORY_SHARE = 0.8  # of a GPU; the rest is for the driver, weights, optimizer and the mean
LEAST_MEMORY = 2 * 10**9

CPU_FILTERS = 8  # of the first level: a sixteenth of the work of 32
CPU_SHARE = 1 / 40  # of REFERENCE_UNITS: a step of about a second on two cores


@dataclass(frozen=True)
class Topology:
    """Levels of a U-Net, the image's first: strides into each and kernels of each; patch: padded to fit."""

    patch: Sides
    strides: tuple[Sides, ...]
    kernels: tuple[Sides, ...]

    @property
    def divisors(self) -> Sides:
        return tuple(math.prod(factors) for factors in zip(*self.strides, strict=True))


@dataclass(frozen=True)
class NetworkPlan:
    """What the rules decide together, since patch, depth and batch size depend on each other.

    first_patch: before memory limited it; covered: images that make MOST_COVERED of all training voxels;
    fitting: images that fit the memory.
    """

    topology: Topology
    first_patch: Sides
    base_filters: int
    batch_size: int
    covered: int
    fitting: int

    @property
    def levels(self) -> int:
        return len(self.topology.strides)


@dataclass(frozen=True)
class Limits:
    """How large a network may be: `units` is the reference that patch and batch are held against.

    client: whose hardware decides; reason: why, for the plan.
    """

    base_filters: int
    units: float
    client: ClientFacts
    reason: str


def find_limits(facts: Facts) -> Limits:
    """Networks and batches that every client can train; all train the same, so the smallest decides.

    nnU-Net plans for 8 GB whatever the GPU has, and so do we where all clients have them. A smaller GPU gives
    a smaller plan by nnU-Net's own rule, not smaller passes (`compute.micro_batch`): Dice of a batch and the
    time of a step stay the same everywhere. A client without a GPU gives a network for two
    cores (ours).
    """
    dimensions = facts.dimensions
    reference = REFERENCE_UNITS[dimensions]
    slow = [client for client in facts.clients if client.device == "cpu"]
    smallest = min(slow or facts.clients, key=lambda client: client.memory)
    if smallest.memory < LEAST_MEMORY:
        raise ConfigError(
            f"client '{smallest.name}' has {format_bytes(smallest.memory)} of memory; no plan fits less than "
            f"{format_bytes(LEAST_MEMORY)}. Give it a larger machine, or leave it out of clients."
        )
    if slow:
        reason = f"'{smallest.name}' has no GPU, so a step must be short on {smallest.cores} cores"
        return Limits(CPU_FILTERS, reference * CPU_SHARE, smallest, reason)
    target = min(REFERENCE_MEMORY, MEMORY_SHARE * smallest.memory)
    reason = f"planned for {target / 1e9:.3g} GB, as nnU-Net does"
    if target < REFERENCE_MEMORY:
        has = format_bytes(smallest.memory)
        reason = f"planned for {target / 1e9:.3g} GB, since '{smallest.name}' has {has}"
    return Limits(BASE_FILTERS, reference * target / REFERENCE_MEMORY, smallest, reason)


def plan_network(
    spacing: Sequence[float],
    shape: Sequence[int],
    *,
    outputs: int,
    num_train: int,
    base_filters: int,
    units: float,
) -> NetworkPlan:
    """Patch, levels and batch size for prepared images of this spacing and median shape.

    nnU-Net (`get_plans_for_configuration`): begin with a patch of the voxels' aspect ratio, no larger than
    the median image; while two of them do not fit, shrink the side that covers most of the image; then fill
    the memory with images, up to 5 % of all training voxels and at least two.
    outputs: classes with the background, or regions.
    """
    order = nnunet_order(spacing)
    spacing, shape = [spacing[axis] for axis in order], [shape[axis] for axis in order]
    dimensions = len(spacing)
    first = topology = find_topology(spacing, first_patch(spacing, shape))

    def estimate(topology: Topology) -> int:
        return count_units(topology, outputs, base_filters)

    most = units * REFERENCE_BATCH[dimensions] / SMALLEST_BATCH
    while estimate(topology) > most:
        topology = shrink(topology, spacing, shape)
    fitting = round(units / estimate(topology) * REFERENCE_BATCH[dimensions])
    covered = round(num_train * math.prod(shape) * MOST_COVERED / math.prod(topology.patch))
    batch_size = max(min(fitting, covered), SMALLEST_BATCH)
    back = [order.index(axis) for axis in range(dimensions)]
    return NetworkPlan(
        reorder(topology, back),
        reorder(first, back).patch,
        base_filters,
        batch_size,
        covered,
        fitting,
    )


def nnunet_order(spacing: Sequence[float]) -> list[int]:
    """Our axes as nnU-Net counts them: the last axis of a volume first, but before it the coarsest.

    It decides only which of two equal axes shrinks first.
    """
    if len(spacing) == 2:
        return [0, 1]
    order = list(reversed(range(len(spacing))))
    coarsest = max(order, key=lambda axis: spacing[axis])
    return [coarsest, *(axis for axis in order if axis != coarsest)]


def reorder(topology: Topology, order: Sequence[int]) -> Topology:
    """The same network with other axes first."""

    def move(sides: Sides) -> Sides:
        return tuple(sides[axis] for axis in order)

    return Topology(
        move(topology.patch), tuple(map(move, topology.strides)), tuple(map(move, topology.kernels))
    )


def first_patch(spacing: Sequence[float], shape: Sequence[int]) -> Sides:
    """A cube in millimetres with as many voxels as 256^3 (2048^2), no larger than the median image."""
    dimensions = len(spacing)
    scale = START_SIDE[dimensions] * math.prod(spacing) ** (1 / dimensions)
    return tuple(min(round(scale / side), most) for side, most in zip(spacing, shape, strict=True))


def find_topology(spacing: Sequence[float], patch: Sequence[int]) -> Topology:
    """Poolings and kernels of a patch (nnU-Net's `get_pool_and_conv_props`).

    A level halves all axes that are long enough (8 voxels; 12 where it is one alone) and whose voxels are
    less than twice as large as the smallest of these: fine axes are halved until voxels are cubes. Kernels
    are 1 along axes of coarser voxels and 3 from the level on where they are no longer coarser; 3 everywhere
    at the deepest. The patch grows to a multiple of the strides. Ours: at least two levels, at most ten.
    """
    axes = range(len(spacing))
    now, sizes = list(spacing), list(patch)
    strides: list[Sides] = [(1,) * len(spacing)]
    kernels: list[Sides] = []
    kernel = [1] * len(spacing)
    while len(strides) < MOST_LEVELS:
        halved = choose_axes(now, sizes)
        if not halved and len(strides) == 1:
            halved = [axis for axis in axes if sizes[axis] > 1] or list(axes)
        if not halved:
            break
        kernel = [3 if kernel[axis] == 3 or now[axis] / min(now) < 2 else 1 for axis in axes]
        kernels.append(tuple(kernel))
        strides.append(tuple(2 if axis in halved else 1 for axis in axes))
        for axis in halved:
            now[axis] *= 2
            sizes[axis] = math.ceil(sizes[axis] / 2)
    kernels.append((3,) * len(spacing))
    divisors = [math.prod(level[axis] for level in strides) for axis in axes]
    fewest = [2 if step > 1 else 1 for step in divisors]  # a norm needs more than one voxel
    padded = tuple(
        max(math.ceil(side / step), least) * step
        for side, step, least in zip(patch, divisors, fewest, strict=True)
    )
    return Topology(padded, tuple(strides), tuple(kernels))


def choose_axes(spacing: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """The axes that the next level halves; none where the deepest is reached."""
    long_enough = [axis for axis, side in enumerate(sizes) if side >= 2 * SMALLEST_MAP]
    if not long_enough:
        return []
    finest = min(spacing[axis] for axis in long_enough)
    chosen = [axis for axis in long_enough if spacing[axis] / finest < 2]
    if len(chosen) == 1 and sizes[chosen[0]] < 3 * SMALLEST_MAP:
        return []
    return chosen


def list_widths(levels: int, base_filters: int, dimensions: int) -> list[int]:
    """Channels of every level: doubled from one to the next, up to a limit."""
    return [min(base_filters * 2**level, MOST_FILTERS[dimensions]) for level in range(levels)]


def count_units(topology: Topology, outputs: int, base_filters: int) -> int:
    """Values in the feature maps of one image: nnU-Net's measure of memory.

    Two convolutions a level on the way down; on the way up a transposed one and two more; and the logits.
    """
    widths = list_widths(len(topology.strides), base_filters, len(topology.patch))
    sides, voxels = list(topology.patch), []
    for stride in topology.strides:
        sides = [side // step for side, step in zip(sides, stride, strict=True)]
        voxels.append(math.prod(sides))
    down = sum(2 * width * count for width, count in zip(widths, voxels, strict=True))
    up = sum(3 * width * count for width, count in zip(widths[:-1], voxels[:-1], strict=True))
    return down + up + outputs * voxels[0]


def shrink(topology: Topology, spacing: Sequence[float], shape: Sequence[int]) -> Topology:
    """A patch one step smaller along the side that covers the largest part of the median image.

    The step is what the smaller patch must be a multiple of, so that 224 follows 256 and not 192.
    """
    patch = list(topology.patch)
    shares = [side / whole for side, whole in zip(patch, shape, strict=True)]
    axis = max(range(len(patch)), key=lambda axis: (shares[axis], axis))
    tried = list(patch)
    tried[axis] = max(1, tried[axis] - topology.divisors[axis])
    step = find_topology(spacing, tried).divisors[axis]
    patch[axis] -= step
    smaller = find_topology(spacing, patch) if patch[axis] > 0 else topology
    if math.prod(smaller.patch) >= math.prod(topology.patch):
        raise ConfigError(
            f"no patch fits: two of {format_size(topology.patch)} voxels are too large for the memory of the "
            "smallest client. Use a larger machine, or resample to coarser voxels (prepare.spacing)."
        )
    return smaller
