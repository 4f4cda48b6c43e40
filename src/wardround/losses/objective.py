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
from wardround.data.annotation import Annotation
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses import segmentation
from wardround.losses.partial import exclusion_loss, marginal
from wardround.losses.reference import Reference
from wardround.models.base import Output, Segmenter, pad


class Context:
    """What an objective, or a method's extra term, may know beside model and batch.

    share: what part of the optimizer step's batch the present pass sees, 1 unless it was cut up;
    global_, previous: frozen copies of the model this round started from and of the one this client
    returned last (the global one again when there is none yet; see `has_previous`);
    has_unlabelled: whether the client has cases without a label; teacher: then a model of its own, which the
    objective may change, kept between rounds;
    memory: the objective's own small state, kept between rounds and never sent;
    annotation: what the client's labels tell apart, None for all classes; restrict: makes a loss one of
    that (`Objective.restrict`); exclusion: weight of the exclusion loss;
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
        has_unlabelled: bool = False,
        teacher: nn.Module | None = None,
        run: Run | None = None,
        compiled: Callable[[Callable[..., Any], Tensor], Callable[..., Any]] | None = None,
        annotation: Annotation | None = None,
        restrict: Restrict | None = None,
        exclusion: float = 0.0,
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
        self.has_unlabelled = has_unlabelled
        self.teacher = teacher
        self._run = run or run_as_written
        self._compiled = compiled
        self.annotation = annotation
        self.exclusion = exclusion
        self._restrict = restrict

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

    def supervise(
        self,
        function: Callable[..., Any],
        logits: Tensor,
        label: Tensor,
        *,
        rows: Tensor | None = None,
        annotation: Annotation | None = None,
    ) -> Any:
        """A loss of the pass's logits against labels, or several in a tuple or a dictionary.

        With deep supervision it is the mean over resolutions, weighted 1, 1/2, 1/4 ... (nnU-Net).
        rows: the cases of the pass that logits and label are of, by default all; annotation: what these
        labels tell apart, by default the client's.
        """
        self.has_supervised = True
        annotation = annotation or self.annotation
        if annotation is not None and self._restrict is not None:
            return self._supervise(self._restrict(function, annotation), logits, label, rows)
        return self._supervise(partial(self.run_compiled, function), logits, label, rows)

    def exclude(self, probabilities: Callable[[Tensor], Tensor], label: Tensor) -> Tensor:
        """The exclusion loss of the pass's logits, at every resolution, by its weight."""
        annotation = self.annotation
        assert annotation is not None

        def exclusion(logits: Tensor, label: Tensor) -> Tensor:
            return exclusion_loss(probabilities(logits), label, annotation=annotation)

        loss: Tensor = self.exclusion * self._supervise(exclusion, self.output.logits, label)
        return loss

    def _supervise(
        self, function: Callable[..., Any], logits: Tensor, label: Tensor, rows: Tensor | None = None
    ) -> Any:
        found = [function(logits, label)]
        for coarse in self.output.deep:
            coarse = coarse if rows is None else coarse[rows]
            found.append(function(coarse, coarsen(label, self._size, coarse)))
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


Restrict = Callable[[Callable[..., Any], Annotation], Callable[..., Any]]
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


@dataclass(frozen=True)
class Objective(ABC):
    """Base of all objectives: probabilities by sigmoid (two classes) or softmax (more)."""

    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # features, decoder, global, previous, teacher, two_views
    uses_unlabelled: ClassVar[bool] = False  # whether `loss` takes cases without a label (`Batch.labelled`)
    least_together: ClassVar[int] = 1  # cases a pass needs for a meaningful loss

    @property
    def counts_background(self) -> bool:
        """Whether sums over voxels run over those of background as well."""
        return False

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

    def restrict(self, function: Callable[..., Any], annotation: Annotation) -> Callable[..., Any]:
        """A loss of logits and labels, such as `sample_losses`, of what a client's labels tell apart.

        Default: probabilities of classes that are not told apart are added up first (marginal loss).
        """
        return partial(marginal, function, annotation=annotation)

    def check_annotation(self, annotation: Annotation) -> None:
        """Refuse labels that do not say everything, where the objective cannot use them; by default voxels to
        be ignored, where `counts_background`."""
        if annotation.ignores and self.counts_background:
            raise ConfigError(
                f"objective '{self.title}' sums over background voxels too and cannot leave out those to be "
                "ignored (ignore in federation.yaml). Choose another, for example dice_bce."
            )

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

    def check_classes(self, num_classes: int) -> None:
        """Refuse data with other classes than the objective is made for."""

    def warnings(self, config: Config) -> list[str]:
        """What is allowed but unusual, each in a sentence: logged at the start, shown in every record."""
        return []


def told_losses(objective: Objective, logits: Tensor, label: Tensor, annotation: Annotation | None) -> Tensor:
    """`sample_losses` of what a client's labels tell apart."""
    if annotation is None:
        return objective.sample_losses(logits, label)
    losses: Tensor = objective.restrict(objective.sample_losses, annotation)(logits, label)
    return losses


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

    @property
    def counts_background(self) -> bool:
        return self.include_background

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
    counts_background = True

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
