"""Objective: what a client minimises, whichever method runs.

An objective is a frozen dataclass of its settings. It says what it needs (`needs`): encoder
features, frozen reference models, a second view of the batch; the training loop provides it
through the `Context`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.config import Config
from wardround.data.cases import Batch
from wardround.losses import segmentation
from wardround.models.base import Output, Segmenter, pad


class Context:
    """What an objective, or a method's extra term, may know beside model and batch.

    share: what part of the optimizer step's batch the present pass sees, 1 unless it was cut up;
    global_, previous: frozen copies of the model this round started from and of the one this client
    returned last (the global one again when there is none yet; see `has_previous`);
    memory: the objective's own small state, kept between rounds and never sent;
    output: what the current forward pass gave; numbers, fixed: where a CUDA graph reads the objective's, and
    the tensors of a method's `ParameterTerm`.
    """

    def __init__(
        self,
        *,
        round: int,
        rounds: int,
        num_examples: int,
        memory: dict[str, Any],
        generator: torch.Generator,
        with_features: bool = False,
        global_: Reference | None = None,
        previous: Reference | None = None,
        has_previous: bool = False,
        run: Run | None = None,
        compiled: Callable[[Callable[..., Any], Tensor], Callable[..., Any]] | None = None,
    ) -> None:
        self.round = round
        self.rounds = rounds
        self.num_examples = num_examples
        self.memory = memory
        self.generator = generator
        self.with_features = with_features
        self.has_previous = has_previous
        self.epoch = 0
        self.step = 0
        self.share = 1.0
        self.second_view: Tensor | None = None
        self.output: Output = Output(logits=torch.empty(0))
        self.terms: dict[str, Tensor] = {}
        self.numbers: Mapping[str, Tensor] = {}
        self.fixed: Mapping[str, Tensor] | None = None
        self.has_supervised = True  # whether `supervise` was called since the last pass
        self._size: Sequence[int] = ()  # of the image as the network pads it
        self._made: dict[str, Tensor] = {}
        self._made_in = -1  # which step
        self._global = global_
        self._previous = previous
        self._run = run or run_as_written
        self._compiled = compiled

    @property
    def global_(self) -> Reference:
        if self._global is None:
            raise LookupError("add 'global' to `needs` to use the received model")
        return self._global

    @property
    def previous(self) -> Reference:
        if self._previous is None:
            raise LookupError("add 'previous' to `needs` to use the last local model")
        return self._previous

    @property
    def features(self) -> Tensor:
        """The encoder's deepest features of the current forward pass."""
        if self.output.bottleneck is None:
            raise LookupError("add 'features' to `needs` to use encoder features")
        return self.output.bottleneck

    def forward(self, model: nn.Module, image: Tensor) -> Output:
        """One forward pass, with features where `needs` asks for them; kept in `output`."""
        if not isinstance(model, Segmenter) or not model.is_deep:
            self.output = self._run(model, image, self.with_features)
            return self.output
        self._size, self.has_supervised = model.padded_size(image.shape[2:]), False
        self.output = model.with_deep_logits(lambda: self._run(model, image, self.with_features))
        return self.output

    def supervise(self, function: Callable[..., Any], logits: Tensor, label: Tensor) -> Any:
        """A loss of the pass's logits against labels, or several in a tuple or a dictionary.

        With deep supervision it is the mean over resolutions, weighted 1, 1/2, 1/4 ... (nnU-Net).
        """
        self.has_supervised = True
        found = [self.run_compiled(function, logits, label)]
        for coarse in self.output.deep:
            there = coarsen(label, self._size, coarse)
            found.append(self.run_compiled(function, coarse, there))
        return found[0] if len(found) == 1 else mean_over_resolutions(found)

    def run_compiled(self, function: Callable[..., Any], logits: Tensor, *others: Tensor) -> Any:
        """Call a function of tensors alone, compiled where the network is."""
        if self._compiled is not None:
            function = self._compiled(function, logits)
        return function(logits, *others)

    def make_once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A value made once per step, however many passes the step takes."""
        if self._made_in != self.step:
            self._made, self._made_in = {}, self.step
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def make_again(self) -> None:
        """Forget what `make_once` made in this step."""
        self._made_in = -1

    def number(self, name: str, value: float) -> float | Tensor:
        """One of `Objective.numbers`: as it is, or the tensor in which a CUDA graph finds it."""
        return self.numbers.get(name, value)

    def note(self, term: str, value: Tensor) -> None:
        """Show a loss term in the records (mean over steps); costs no synchronisation."""
        value = value.detach() if self.share == 1 else value.detach() * self.share
        self.terms[term] = self.terms[term] + value if term in self.terms else value


Run = Callable[[nn.Module, Tensor, bool], Output]
"""A forward pass of a network, with features or without."""


def run_as_written(model: nn.Module, image: Tensor, with_features: bool) -> Output:
    if with_features and isinstance(model, Segmenter):
        return model.forward_features(image)
    return Output(logits=model(image))


def coarsen(label: Tensor, padded: Sequence[int], logits: Tensor) -> Tensor:
    """The label on the grid of a coarser map, whose image was padded to a size first."""
    is_soft = label.dim() == logits.dim()
    whole = pad(label if is_soft else label[:, None], padded)
    there = segmentation.downsample(whole, logits.shape[2:])
    return there if is_soft else there[:, 0]


def mean_over_resolutions(found: Sequence[Any]) -> Any:
    """Values of every resolution, fine to coarse, as one: each weighs half of the one before."""
    first = found[0]
    if isinstance(first, dict):
        return {name: mean_over_resolutions([values[name] for values in found]) for name in first}
    if isinstance(first, tuple):
        return tuple(mean_over_resolutions(values) for values in zip(*found, strict=True))
    if first is None:
        return None
    weights = [0.5**level for level in range(len(found))]
    return sum(weight / sum(weights) * value for weight, value in zip(weights, found, strict=True))


class Reference:
    """A frozen model: evaluation mode, no gradient, encoder only.

    Where the same images come back every epoch, their features are computed once and kept.
    given: an image and where a captured step finds its features; seen: what was computed last, likewise.
    """

    def __init__(self, model: Segmenter, encode: Callable[[Segmenter, Tensor], Tensor] | None = None) -> None:
        self.model = model
        self.room = 0  # bytes that kept features may take
        self._encode = encode or (lambda model, image: model.encode(image))
        self.given: tuple[Tensor, Tensor] | None = None
        self.seen: tuple[Tensor, Tensor] | None = None
        self._kept: dict[int, Tensor] = {}
        self._image: Tensor | None = None
        self._cases: list[int] = []

    def encode(self, image: Tensor) -> Tensor:
        if self.given is not None and image is self.given[0]:
            return self.given[1]
        expected = image is self._image
        kept = self.kept() if expected else None
        if kept is not None:
            return kept
        with torch.no_grad():
            features = self._encode(self.model, image)
        self.seen = image, features
        if expected:
            self.keep(features)
        return features

    def expect(self, image: Tensor | None, cases: Sequence[int] = ()) -> None:
        """Say that the next batch holds these cases, unaugmented; None: no image is seen twice."""
        self._image, self._cases = image, list(cases)

    @property
    def expects(self) -> bool:
        return self._image is not None

    def kept(self) -> Tensor | None:
        """Features of the expected batch, where those of all its cases are known."""
        if self._image is None or any(case not in self._kept for case in self._cases):
            return None
        return stack_cases([self._kept[case] for case in self._cases])

    def keep(self, features: Tensor) -> None:
        """Remember the expected batch's features, as long as there is room."""
        if self._image is not None:
            self.room -= features.nbytes
            if self.room >= 0:
                self._kept.update(zip(self._cases, features.unbind(), strict=True))

    def forget(self) -> None:
        """Drop kept features: the model or the cases have changed."""
        self._kept, self._image, self.seen = {}, None, None

    def copy_from(self, model: nn.Module) -> None:
        """Take over the present state of another model (for references that move within a round)."""
        self.forget()
        self.model.load_state_dict(model.state_dict())


def stack_cases(cases: Sequence[Tensor]) -> Tensor:
    """One batch (B, C, *spatial) in the memory layout its cases have: those with channels last stay so."""
    if cases[0].is_contiguous():
        return torch.stack(list(cases))
    return torch.stack([case.movedim(0, -1) for case in cases]).movedim(-1, 1)


@dataclass(frozen=True)
class Objective(ABC):
    """Base of all objectives: probabilities by sigmoid (two classes) or softmax (more)."""

    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # features, decoder, global, previous, two_views
    least_together: ClassVar[int] = 1  # cases a pass needs for a meaningful loss

    def num_outputs(self, num_classes: int) -> int:
        """Channels the network must put out."""
        return 1 if num_classes == 2 else num_classes

    def count_classes(self, num_outputs: int) -> int:
        """Classes that so many channels tell apart, background among them."""
        return max(2, num_outputs)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Class probabilities (B, classes, *spatial), background first."""
        if logits.shape[1] == 1:
            foreground = torch.sigmoid(logits.float())
            return torch.cat([1 - foreground, foreground], dim=1)
        return torch.softmax(logits.float(), dim=1)

    def predict(self, logits: Tensor) -> Tensor:
        """Label map (B, *spatial); monotone maps keep the order, so logits decide."""
        if logits.shape[1] == 1:
            return (logits[:, 0] > 0).to(torch.uint8)
        return logits.argmax(dim=1).to(torch.uint8)

    def decide(self, probabilities: Tensor) -> Tensor:
        """Label map (B, *spatial) of class probabilities, where these are means over several passes."""
        return probabilities.argmax(dim=1).to(torch.uint8)

    def to_average(self, logits: Tensor) -> Tensor:
        """What a mean over several views of a case is taken of: class probabilities, a channel a logit."""
        return segmentation.probabilities(logits)

    def from_average(self, average: Tensor) -> Tensor:
        """Logits that stand for such a mean."""
        least = torch.finfo(average.dtype).tiny
        logs = average.clamp_min(least).log()
        return logs - (1 - average).clamp_min(least).log() if average.shape[1] == 1 else logs

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """The scalar to minimise on one batch."""

    @abstractmethod
    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """The supervised loss of each case (B,), for validation."""

    def start_model(self, model: nn.Module) -> None:
        """Add what the objective trains beside the network (projection heads); default nothing."""

    def local_names(self, model: nn.Module) -> list[str]:
        """State-dict names that stay at the client (a local projection head); default none."""
        return []

    def constants(self, context: Context) -> tuple[object, ...] | None:
        """What `loss` takes from the context beside tensors, so that a CUDA graph of a step can be reused.

        Equal answers mean that one graph serves both. None, the default: the loss inspects values,
        draws random numbers of its own or keeps state on the host, and is never captured.
        """
        return None

    def numbers(self, context: Context) -> dict[str, float]:
        """Factors that differ from round to round; a `loss` that takes them by `context.number` needs no
        new graph for each."""
        return {}

    def start_epoch(self, model: nn.Module, context: Context) -> None:
        """Called before each local epoch (to move a reference within a round); default nothing."""

    def check(self, config: Config) -> None:
        """Refuse what cannot work, with the reason, when the configuration is read."""

    def check_present(self) -> None:
        """Refuse to train without what only a process of the user's has; default nothing."""

    def check_classes(self, num_classes: int) -> None:
        """Refuse data with other classes than the objective is made for."""

    def warnings(self, config: Config) -> list[str]:
        """What is allowed but unusual, each in a sentence: logged at the start, shown in every record."""
        return []


@dataclass(frozen=True)
class Supervised(Objective):
    """An objective that is one function of logits and labels."""

    @abstractmethod
    def function(self) -> Callable[..., Tensor]:
        """The loss, its settings filled in."""

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        logits = context.forward(model, batch.image).logits
        loss: Tensor = context.supervise(self.function(), logits, batch.label)
        return loss

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return self.function()(logits, label, reduce=False)

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return ()


Smooth = Annotated[float, Field(ge=0, description="added to numerator and denominator")]


@dataclass(frozen=True)
class Dice(Supervised):
    """Soft Dice: 1 - (2 sum yp + s) / (sum y + sum p + s), of each class and case, or of the whole batch."""

    title = "Soft Dice"
    paper = "Milletari et al., 3DV 2016"
    smooth: Smooth = 1e-5
    reduction: Annotated[
        Literal["per_sample", "batch"], Field(description="sums run over each case, or over the whole batch")
    ] = "per_sample"
    include_background: Annotated[bool, Field(description="whether background counts as a class")] = False

    def function(self) -> Callable[..., Tensor]:
        return partial(segmentation.dice_loss, **self.dice_settings())

    def dice_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("smooth", "reduction", "include_background")}


@dataclass(frozen=True)
class DiceBCE(Dice):
    """Soft Dice, of each case or of the batch, plus binary (two classes) or categorical cross entropy."""

    title = "Dice + cross entropy"
    paper = "Isensee et al., Nature Methods 2021"

    def function(self) -> Callable[..., Tensor]:
        return partial(segmentation.dice_bce_loss, **self.dice_settings())


@dataclass(frozen=True)
class GeneralisedDice(Supervised):
    """Dice over all classes, each weighted by the inverse square of its volume."""

    title = "Generalised Dice"
    paper = "Sudre et al., DLMIA 2017"

    def function(self) -> Callable[..., Tensor]:
        return segmentation.generalised_dice_loss


@dataclass(frozen=True)
class FocalTversky(Supervised):
    """(1 - Tversky index)^(1/gamma).

    alpha weighs missed foreground, beta false alarms; gamma above 1 stresses hard cases.
    """

    title = "Focal Tversky"
    paper = "Abraham and Khan, ISBI 2019"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    beta: Annotated[float, Field(ge=0, le=1)] = 0.3
    gamma: Annotated[float, Field(gt=0)] = 4 / 3
    smooth: Smooth = 1.0

    def function(self) -> Callable[..., Tensor]:
        return partial(
            segmentation.focal_tversky_loss,
            alpha=self.alpha,
            beta=self.beta,
            gamma=self.gamma,
            smooth=self.smooth,
        )


@dataclass(frozen=True)
class CrossEntropy(Supervised):
    """Binary (two classes) or categorical cross entropy, mean over voxels."""

    title = "Cross entropy"

    def function(self) -> Callable[..., Tensor]:
        return segmentation.cross_entropy_loss
