"""Standalone: the files that an ONNX export carries, so that it runs without wardround and without PyTorch.

prepare_and_run   a scan to its mask by NumPy, SciPy and onnxruntime, as inference.json says
scan_files        reading scans and writing masks

They are copied, never imported here; `exporting.inference` writes inference.json.
"""
