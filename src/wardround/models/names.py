"""Names of tensors in a state dict."""

from __future__ import annotations

from torch import nn


def state_names(model: nn.Module, layer: nn.Module) -> list[str]:
    """State-dict names of one layer's own tensors; a layer registered twice has them twice."""
    prefixes = [name for name, module in model.named_modules(remove_duplicate=False) if module is layer]
    return [full_name(prefix, name) for prefix in prefixes for name in layer.state_dict()]


def full_name(prefix: str, name: str) -> str:
    """A tensor's state-dict name; the model itself has the prefix ""."""
    return f"{prefix}.{name}" if prefix else name
