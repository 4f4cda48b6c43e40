"""ONNX: the network as one file that runs without PyTorch, checked against PyTorch before it is kept.

Graph: image (batch, channels, *spatial) -> probabilities (batch, classes, *spatial), logits. Batch and
spatial sides are free. Padding to the network's divisor and cropping back are part of the graph; they are
written here once more, without the `if` on sizes that training has, because a graph has no `if` of Python.

Probabilities are the objective's own, after the temperature of calibration.json where the run has one;
logits are as the network gives them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.models.base import Segmenter
from wardround.models.probe import meta_copy
from wardround.models.variational import EVALUATION_SEED, VariationalSegmenter
from wardround.uncertainty.maps import tempered

TOLERANCE = 1e-4
# Of images within one block: a norm over two voxels magnifies rounding. Measured there, float32 against
# float64: PyTorch up to 3e-4, onnxruntime up to 1.4e-3 (unet2d_fedevi, random weights).
SMALL_TOLERANCE = 1e-2
NEEDED = ("onnx", "onnxscript", "onnxruntime")
AXES = {2: ("height", "width"), 3: ("x", "y", "z")}
SIZE_DECIDES = "how it computes depends on the size of the image"
MOST_BYTES = 1_900_000_000  # one ONNX file holds 2 GB


@dataclass(frozen=True)
class Difference:
    """The largest differences at one size: of probabilities, and of logits relative to the largest one.

    limit: what is allowed at this size; wider for an image within one block of the network.
    """

    shape: tuple[int, ...]
    probabilities: float
    logits: float
    limit: float = TOLERANCE

    @property
    def largest(self) -> float:
        return max(self.probabilities, self.logits)


def check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"export to ONNX needs {', '.join(missing)}, not installed here: pip install 'wardround[onnx]'"
        )


# The graph


class Exportable(nn.Module):
    """A network and its objective in one module, for any size without a branch on sizes."""

    def __init__(self, network: Segmenter, objective: Objective, temperature: float) -> None:
        super().__init__()
        self.network = network
        self.objective = objective
        self.temperature = temperature
        if isinstance(network, VariationalSegmenter) and network.settings.eval_samples > 1:
            self.register_buffer("draws", weight_draws(network))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, *spatial) -> probabilities (B, classes, *spatial), logits (B, outputs, *spatial)."""
        logits = self.logits(image)
        return probabilities_of(self.objective, logits, self.temperature), logits

    def logits(self, image: Tensor) -> Tensor:
        network = self.network
        if isinstance(network, VariationalSegmenter):
            if network.settings.eval_samples == 1:
                return fitted(network.backbone, network.stem(image))
            draws = self.get_buffer("draws")  # (samples, width, source)
            stems = [network.stem._convolve(image, weights.expand(len(image), -1, -1)) for weights in draws]
            return torch.stack([fitted(network.backbone, stem) for stem in stems]).mean(dim=0)
        return fitted(network, image)


def probabilities_of(objective: Objective, logits: Tensor, temperature: float) -> Tensor:
    """`uncertainty.maps.tempered` in float32 alone: runtimes lack some functions of float64."""
    if temperature == 1:
        return objective.probabilities(logits)
    if type(objective).probabilities is not Objective.probabilities:
        return torch.softmax(objective.probabilities(logits).log() / temperature, dim=1)
    return objective.probabilities(logits / temperature)


def weight_draws(network: VariationalSegmenter) -> Tensor:
    """The weights evaluation on a CPU draws, as constants: (samples, width, source)."""
    stem, generator = network.stem, torch.Generator().manual_seed(EVALUATION_SEED)
    drawn = [
        stem.mu + stem.sigma * torch.randn(stem.mu.shape, dtype=stem.mu.dtype, generator=generator)
        for _ in range(network.settings.eval_samples)
    ]
    return torch.stack(drawn).detach()


def fitted(network: Segmenter, x: Tensor) -> Tensor:
    """The logits of an image of any size: padded as `models.base` does, and cropped back."""
    if type(network).forward_features is not Segmenter.forward_features:
        return network.forward_features(x).logits  # it does more than pad; its own way is tried
    size = x.shape[2:]
    pads = [
        amount
        for side, padded in reversed(list(zip(size, padded_size(network, size), strict=True)))
        for amount in (0, padded - side)
    ]
    logits = network._output(F.pad(x, pads, mode="replicate")).logits
    for axis, side in enumerate(size, start=2):
        logits = logits.narrow(axis, 0, side)
    return logits


def padded_size(network: Segmenter, size: Sequence[int]) -> list[int]:
    """`network.padded_size` in plain arithmetic, for sides that are not known yet.

    Our networks pad some axes to whole blocks and, where that leaves one block, may add one on some axis.
    Which is asked with known sides; the check of the finished graph would find a network with another rule.
    """
    steps = network.divisors
    odd = [step + 1 if step > 1 else 1 for step in steps]
    padded = [side != other for side, other in zip(network.padded_size(odd), odd, strict=True)]
    one_block = [step if is_padded else 1 for step, is_padded in zip(steps, padded, strict=True)]
    added = [side - block for side, block in zip(network.padded_size(one_block), one_block, strict=True)]
    counts = [
        (side + step - 1) // step if is_padded else 1
        for side, step, is_padded in zip(size, steps, padded, strict=True)
    ]
    product = 1
    for count in counts:
        product = product * count
    is_one: Any = torch.sym_max(0, 2 - product)  # type: ignore[no-untyped-call]  # 1 or 0
    return [
        (count * step if is_padded else side) + (extra * is_one if extra else 0)
        for side, step, count, is_padded, extra in zip(size, steps, counts, padded, added, strict=True)
    ]


# Writing


def export_onnx(
    path: Path,
    network: Segmenter,
    objective: Objective,
    *,
    temperature: float = 1.0,
    facts: Mapping[str, Any] | None = None,
) -> list[Difference]:
    """Write the file and hold it against PyTorch; a network that cannot be exported is refused.

    facts: kept in the file's metadata_props, each value as text (JSON where it is not text).
    """
    check_installed()
    weight = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    if weight > MOST_BYTES:
        raise ConfigError(f"the network has {weight / 1e9:.1f} GB of weights; one ONNX file holds 2 GB.")
    module = Exportable(network, objective, temperature).eval().requires_grad_(False)
    program = traced(module, network)
    for key, value in (facts or {}).items():
        program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
    program.model.producer_name = "wardround"
    path.parent.mkdir(parents=True, exist_ok=True)
    with quiet():
        program.save(path, external_data=False)
    return checked(path, network, objective, temperature)


def traced(module: Exportable, network: Segmenter) -> Any:
    """The graph with free batch and sides."""
    divisor = network.divisor
    sides = [divisor * (number + 1) + 1 + 2 * number for number in range(1, network.dimensions + 1)]
    example = torch.zeros(2, network.in_channels, *sides)  # no side fits, none equals another
    names = {0: "batch", **dict(enumerate(AXES[network.dimensions], start=2))}
    with quiet():
        try:
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                dynamic_shapes=(dict.fromkeys(names, torch.export.Dim.DYNAMIC),),
                input_names=["image"],
                output_names=["probabilities", "logits"],
                custom_translation_table={operator.floordiv: floor_division},
                verbose=False,
            )
        except Exception as error:
            raise refused(network, one_size(network, example.shape) or reason_of(error)) from error
    assert program is not None
    check_sizes(program, network)
    name_axes(program.model, names, network)
    return program


def floor_division(a: Any, b: Any) -> Any:
    """a // b of whole numbers as in Python; the exporter's own rounds to zero, wrong where a is negative."""
    from onnxscript.onnx_opset import opset18

    return opset18.Div(opset18.Sub(a, opset18.Mod(a, b)), b)


def check_sizes(program: Any, network: Segmenter) -> None:
    """Refuse a graph that holds for some sizes alone: the tracer took a branch on sizes and kept its limits.

    Windows of attention that shrink with the image do so (SwinUNETR). The check by numbers may miss it: its
    small image has a wide limit.
    """
    for limits in program.exported_program.range_constraints.values():
        if limits.lower > 2 or limits.upper < 2**31:  # 2: the tracer's word for any batch
            raise refused(network, SIZE_DECIDES)


def name_axes(model: Any, names: Mapping[int, str], network: Segmenter) -> None:
    """Say batch, height, width in place of the tracer's own symbols; a side that is fixed is refused."""
    import onnx_ir

    image = model.graph.inputs[0]
    for axis in names:
        if isinstance(image.shape[axis], int):
            raise refused(network, f"its graph would take {image.shape[axis]} alone on axis {axis}")
    free = {str(image.shape[axis]): name for axis, name in names.items()}
    for value in (image, *model.graph.outputs):
        sides = [free.get(str(side), side) for side in value.shape]
        if value is not image:
            sides = [names.get(axis, side) for axis, side in enumerate(sides)]
        value.shape = onnx_ir.Shape(sides)


def refused(network: Segmenter, reason: str) -> ConfigError:
    name = getattr(network, "name", None) or type(network).__name__
    return ConfigError(
        f"network '{name}' cannot be exported to ONNX: {reason}. Export it with --to torch or --to bundle."
    )


def reason_of(error: BaseException) -> str:
    """Why there is no graph; the tracer writes pages about sides that decide how a network computes."""
    if re.search("inconsisten|[Cc]onstraints? violated|specialized|data-dependent", str(error)):
        return SIZE_DECIDES
    return last_reason(error)


def one_size(network: Segmenter, shape: Sequence[int]) -> str | None:
    """That PyTorch itself cannot run this shape, but runs one block (UNETR); None if it is not so."""
    block = [shape[0], shape[1], *[network.divisor] * network.dimensions]
    copied = meta_copy(network)
    with torch.no_grad():
        try:
            copied(torch.zeros(*block, device="meta"))
        except Exception:  # somebody's forward pass may raise anything
            return None  # a network that needs numbers, or another mistake
        try:
            copied(torch.zeros(*shape, device="meta"))
        except Exception:  # it ran a block, so whatever it says now is about the size
            return f"it takes images of up to {'x'.join(map(str, block[2:]))} alone"
    return None


def last_reason(error: BaseException) -> str:
    """The first line of what lies at the bottom of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text[:200].rstrip(".: ")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter talks much, and none of it is for our reader."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Checking


def checked(
    path: Path, network: Segmenter, objective: Objective, temperature: float = 1.0
) -> list[Difference]:
    """The differences at several batches and sizes; too large a one is refused.

    PyTorch's side is the network as training and prediction use it, not the module that was traced.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    found: list[Difference] = []
    reason = ""
    for shape in shapes(network):
        image = torch.randn(shape, generator=generator)
        with torch.no_grad():
            try:
                logits = network(image)
            except (RuntimeError, ValueError) as error:  # too small for this network
                reason = last_reason(error)
                continue
            probabilities = tempered(objective, logits, temperature)
        try:
            given = session.run(None, {"image": image.numpy()})
        except Exception as error:
            raise refused(network, f"at {shape} its graph fails: {last_reason(error)}") from error
        found.append(difference(shape, given, probabilities, logits, network))
    if not found:
        raise refused(network, f"PyTorch itself cannot run it ({reason})")
    for entry in found:
        if not entry.largest <= entry.limit:
            by = f"{entry.largest:.1e}, more than {entry.limit:g}"
            raise refused(network, f"at {entry.shape} the graph differs from PyTorch by {by}")
    return found


def difference(
    shape: tuple[int, ...], given: Sequence[Any], probabilities: Tensor, logits: Tensor, network: Segmenter
) -> Difference:
    parts = [torch.from_numpy(value) for value in given]
    for part, expected in zip(parts, (probabilities, logits), strict=True):
        if part.shape != expected.shape:
            raise refused(network, f"at {shape} its graph gives {tuple(part.shape)}")
    scale = max(1.0, float(logits.abs().max()))
    return Difference(
        shape,
        float((parts[0] - probabilities).abs().max()),
        float((parts[1] - logits).abs().max()) / scale,
        SMALL_TOLERANCE if max(shape[2:]) <= network.divisor else TOLERANCE,
    )


def shapes(network: Segmenter) -> list[tuple[int, ...]]:
    """Batches and sizes to check: sides that do not fit, sides that do, and an image within one block."""
    divisor, axes = network.divisor, network.dimensions
    blocks = 1 if axes == 3 and divisor > 16 else 2
    odd = [blocks * divisor + 1 + 2 * axis for axis in range(axes)]
    fits = [(blocks + 1) * divisor, *[blocks * divisor] * (axes - 1)]
    small = [max(1, divisor // 2 + 1)] * axes
    return [(batch, network.in_channels, *sides) for batch, sides in ((1, odd), (2, fits), (3, small))]
