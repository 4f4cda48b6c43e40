"""Exporting: a run's model for other programs, with a model card.

package       what is exported: the network, its settings, how images are prepared
onnx          one file for any ONNX runtime, checked against PyTorch
inference     inference.json, all between a scan and its mask; `standalone` has the script that does it
bundle        a MONAI bundle, run by MONAI's commands; `parts` are the components it names
card          MODEL_CARD.md, written from the run
exports       `export`: a folder that is complete or absent; for PyTorch also its loader
"""

from __future__ import annotations

from wardround.exporting.exports import KINDS, Exported, export

__all__ = ["KINDS", "Exported", "export"]
