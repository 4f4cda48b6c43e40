"""Reference: a frozen model whose features an objective compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from wardround.models.base import Segmenter


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
