"""Exporting: a run's model for other programs, with a model card.

package       what is exported: the network, its settings, how images are prepared
onnx          one file for any ONNX runtime, checked against PyTorch
bundle        a MONAI bundle, run by MONAI's commands; `parts` are the components it names
folder        tensors, JSON and a loader for PyTorch
card          MODEL_CARD.md, written from the run; card_results: its numbers
writing       folders that are complete or absent
"""

from __future__ import annotations

from wardround.exporting.exports import KINDS, Exported, export

__all__ = ["KINDS", "Exported", "export"]
