"""Exporting: a run's model for other programs, each time with a card that says what it is.

package   what is exported: the network, its settings, how images were prepared
onnx      one file for any ONNX runtime, checked against PyTorch
bundle    a MONAI bundle, run by MONAI's own commands; `parts` is what it is made of
folder    tensors, JSON and a loader for PyTorch
card      MODEL_CARD.md, written from the run
writing   whole folders or none
"""

from __future__ import annotations

from wardround.exporting.exports import KINDS, Exported, export

__all__ = ["KINDS", "Exported", "export"]
