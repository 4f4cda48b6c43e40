"""Device, precision, layout, compilation and threads: what the `compute` settings come to on this machine.

What `auto` chooses on a GPU follows from measurements (`benchmarks/train_step.py`, one H200): bfloat16
and channels-last always pay; a CUDA graph pays where a step is so short that launching its kernels takes
longer than running them; compiling with inductor pays where the time it saves in the steps to come exceeds
the time it takes, which is little where kernels of an earlier run are there (`kernel_cache.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wardround.config import ComputeSettings
from wardround.errors import ConfigError
from wardround.machine import cores
from wardround.models.base import Segmenter, forward_cost
from wardround.training import kernel_cache

log = logging.getLogger(__name__)

FLOPS_A_SECOND = 270e12  # a training step in bfloat16, all layers taken together
LAUNCH_BOUND_SECONDS = 0.03  # shorter steps wait for the host
LEAST_STEPS_TO_CAPTURE = 30
INDUCTOR_SAVES = {2: 0.1, 3: 0.03}  # of a step, by dimensions
GRAPH_SAVES = 0.0004  # seconds of a captured step at least, measured on FedEvi's network
INDUCTOR_SECONDS = {2: 60.0, 3: 75.0}  # to compile a network, by dimensions


@dataclass(frozen=True)
class Compute:
    """How this process computes.

    autocast: type of convolutions and matrix products, None: float32; cuda_graphs: training steps and
    evaluation as CUDA graphs; inductor: the network compiled; why: what `auto` weighed, in words; weighed:
    whether it did; network: name of the compiled network in the kernel cache; kernels: folder of that cache.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    tf32: bool = False
    channels_last: bool = False
    cuda_graphs: bool = False
    inductor: bool = False
    micro_batch: int | None = None
    checkpointing: bool = False
    deterministic: bool = False
    why: str = ""
    weighed: bool = False
    network: str | None = None
    kernels: str | None = None

    def __str__(self) -> str:
        layout = "channels last" if self.channels_last else "contiguous"
        reason = f" ({self.why})" if self.why else ""
        return f"computing on {self.device} in {self.precision}, {layout}, compile {self.compile}{reason}"

    @property
    def precision(self) -> str:
        if self.autocast is not None:
            return str(self.autocast).removeprefix("torch.")
        return "tf32" if self.tf32 else "float32"

    @property
    def compile(self) -> str:
        if self.cuda_graphs:
            return "full" if self.inductor else "graphs"
        return "inductor" if self.inductor else "off"

    def as_dict(self) -> dict[str, Any]:
        """For environment.json."""
        return {
            "device": str(self.device),
            "precision": self.precision,
            "memory_format": "channels_last" if self.channels_last else "contiguous",
            "compile": self.compile,
            "why": self.why,
            "weighed": self.weighed,
            "kernels": self.kernels,
            "micro_batch": self.micro_batch,
            "checkpointing": self.checkpointing,
            "deterministic": self.deterministic,
        }


def choose_device(settings: ComputeSettings) -> torch.device:
    """The device asked for; `auto` takes a GPU where there is one."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"compute.device is '{name}'; use auto, cpu, cuda, cuda:0 or mps.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("compute.device is 'cuda', but torch finds no GPU here. Use auto or cpu.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("compute.device is 'mps', but torch finds no GPU of Apple's here. Use auto or cpu.")
    return device


def start_device(settings: ComputeSettings) -> None:
    """Start the only GPU and its libraries in a thread, beside what this process does next.

    What goes wrong is left to whoever uses the GPU first. With several GPUs, clients may be in other
    processes; what is deterministic must be asked for before the libraries start.
    """
    if choose_device(settings).type != "cuda" or torch.cuda.device_count() > 1 or settings.deterministic:
        return

    def start() -> None:
        with contextlib.suppress(Exception):
            device = choose_device(settings)
            image = torch.ones(1, 8, 8, 8, device=device, dtype=torch.bfloat16)
            kernel = torch.ones(8, 8, 3, 3, device=device, dtype=torch.bfloat16, requires_grad=True)
            torch.nn.functional.conv2d(image, kernel).sum().backward()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)

    threading.Thread(target=start, name="start-device", daemon=True).start()


def autocast_dtype(settings: ComputeSettings, device: torch.device) -> torch.dtype | None:
    """The type convolutions run in on this device: bfloat16 where it pays, None for float32."""
    on_gpu = device.type == "cuda"
    wanted = settings.precision == "bfloat16" or (settings.precision == "auto" and on_gpu)
    return torch.bfloat16 if wanted and device.type != "mps" else None


def choose(
    settings: ComputeSettings,
    model: Segmenter | None = None,
    shape: Sequence[int] | None = None,
    batch_size: int = 1,
    steps: int = 0,
) -> Compute:
    """What the settings come to; model, shape of a case, batch_size and steps let `auto` weigh."""
    device = choose_device(settings)
    on_gpu = device.type == "cuda"
    if device.type == "mps":
        return choose_plain(settings, device)
    layout, how, why = settings.memory_format, settings.compile, ""
    graphs, inductor = how in ("graphs", "full"), how in ("inductor", "full")
    network = None
    if on_gpu and model is not None and shape is not None:
        network = name_network(model, shape, batch_size, settings, torch.cuda.get_device_name(device))
    if how == "auto":
        loading = None if network is None else kernel_cache.loading_seconds(network)
        measured = on_gpu and torch.version.hip is None  # what is weighed was measured on NVIDIA's GPUs
        graphs, inductor, why = weigh_compile(measured, model, shape, batch_size, steps, loading)
    if graphs and (not on_gpu or torch.version.hip is not None):
        graphs, why = False, "CUDA graphs need a GPU of NVIDIA's"
        log.info("compute.compile is '%s', but %s; steps run eagerly", how, why)
    return Compute(
        device=device,
        autocast=autocast_dtype(settings, device),
        tf32=on_gpu and settings.precision != "float32",
        channels_last=layout == "channels_last" or (layout == "auto" and on_gpu),
        cuda_graphs=graphs,
        inductor=inductor,
        micro_batch=settings.micro_batch,
        checkpointing=settings.checkpointing,
        deterministic=settings.deterministic,
        why=why,
        weighed=how == "auto" and network is not None,
        network=network,
        kernels=str(kernel_cache.locate()) if on_gpu else None,
    )


def choose_plain(settings: ComputeSettings, device: torch.device) -> Compute:
    """Apple's GPUs: float32 in PyTorch's own layout, step by step; what was asked for beyond it is said."""
    asked = {
        "precision": (settings.precision, ("auto", "float32")),
        "memory_format": (settings.memory_format, ("auto", "contiguous")),
        "compile": (settings.compile, ("auto", "off")),
    }
    for name, (value, possible) in asked.items():
        if value not in possible:
            log.warning("compute.%s is '%s', which mps does not have; %s is used", name, value, possible[1])
    why = "mps has no float64, bfloat16 training, channels-last volumes or CUDA graphs here"
    return Compute(device, micro_batch=settings.micro_batch, checkpointing=settings.checkpointing, why=why)


def name_network(
    model: Segmenter, shape: Sequence[int], batch_size: int, settings: ComputeSettings, gpu: str
) -> str:
    """A name that is the same only where inductor would compile the same kernels, about."""
    tensors = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    how = settings.precision, settings.memory_format, settings.micro_batch, settings.checkpointing
    facts = (torch.__version__, gpu, str(model), tensors, tuple(shape), batch_size, how)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def weigh_compile(
    on_gpu: bool,
    model: Segmenter | None,
    shape: Sequence[int] | None,
    batch_size: int,
    steps: int,
    loading: float | None = None,
) -> tuple[bool, bool, str]:
    """Whether to use CUDA graphs, whether to compile with inductor, and why.

    loading: seconds to load the network where it is compiled already.
    """
    if not on_gpu or model is None or shape is None:
        return False, False, "steps run eagerly" if not on_gpu else "nothing to weigh"
    flops = 3 * batch_size * forward_cost(model, shape)[0]  # backward costs twice the forward
    seconds = flops / FLOPS_A_SECOND
    short = seconds < LAUNCH_BOUND_SECONDS
    a_step = seconds * INDUCTOR_SAVES[len(shape)]
    saved = steps * (max(a_step, GRAPH_SAVES) if short else a_step)
    cost, source = INDUCTOR_SECONDS[len(shape)], "compiling"
    if loading is not None:
        cost, source = loading, "loading kernels of an earlier run"
    sizes = f"about {seconds * 1000:.0f} ms a step, {steps} steps to come"
    if saved > cost:
        pays = f"inductor saves about {saved:.0f} s, {source} takes {cost:.0f} s"
        return short, True, f"{sizes}: {'CUDA graphs, and ' if short else ''}{pays}"
    if short and steps >= LEAST_STEPS_TO_CAPTURE:
        return True, False, f"{sizes}: launching kernels takes most of the time"
    return False, False, f"{sizes}: compiling would take longer than it saves"


def apply(compute: Compute) -> None:
    """Set what torch keeps for the whole process."""
    if compute.device.type == "cuda":
        kernel_cache.use()
        torch.backends.cuda.matmul.allow_tf32 = compute.tf32
        torch.backends.cudnn.allow_tf32 = compute.tf32
        torch.backends.cudnn.benchmark = False  # trying algorithms costs minutes on large volumes
        if compute.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.deterministic = True
            torch.use_deterministic_algorithms(True, warn_only=True)
    if compute.inductor:
        from torch._dynamo import config as dynamo

        # one network is compiled for training and for its references, each a variant of its own
        dynamo.recompile_limit = max(dynamo.recompile_limit, 32)


def threads_for(settings: ComputeSettings, workers: int) -> int:
    """Threads of each process: as asked, or the cores shared evenly among the workers."""
    return settings.threads if settings.threads is not None else max(1, cores() // workers)


def set_threads(threads: int) -> None:
    """Fix the number of torch threads, so that sums are formed in the same order every time."""
    torch.set_num_threads(threads)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is what went wrong; some libraries say it in words alone."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
