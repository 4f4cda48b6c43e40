"""Devices: what each of them lacks is left out and said. MPS and ROCm are faked where there are none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from fake_mps import MpsTensor, fake_mps
from PIL import Image
from pytest import LogCaptureFixture, MonkeyPatch

import wardround as wr
from wardround.batch import share_one_gpu
from wardround.config import ComputeSettings
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.evidential import dirichlet_kl
from wardround.models import instance_norm
from wardround.training.device import choose, choose_device

SMALL = {
    "rounds": 1,
    "batch_size": 4,
    "data": {"phantom": {"hospitals": 2, "cases": 6, "size": 16}},
    "model": {"name": "unet2d", "base_filters": 2, "levels": 2},
    "evaluate": {"metrics": ["dice"]},
    "compute": {"device": "mps", "threads": 1},
}


# Apple's GPUs


# FedMix in its `taylor` form is not here: in a second derivative PyTorch makes zeros where the fake's wrapper
# really is, on the CPU.
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "fedevi"},
        {"name": "feddg"},
        {"name": "harmofl"},
        {"name": "fedmix", "form": "naive"},
    ],
    ids=lambda method: method["name"],
)
def test_mps_trains_and_predicts_as_the_cpu_does(
    method: dict[str, str], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    settings = {**SMALL, "method": method, "output": str(tmp_path / "mps")}
    scan = tmp_path / "scan.png"
    Image.fromarray((torch.rand(16, 16).numpy() * 255).astype("uint8")).save(scan)
    with fake_mps(monkeypatch):
        there = wr.run(settings, quiet=True)
        (found,) = wr.predict(tmp_path / "mps", [scan], device="mps")
    here = wr.run(settings, overrides=["compute.device=cpu", f"output={tmp_path / 'cpu'}"], quiet=True)
    (expected,) = wr.predict(tmp_path / "cpu", [scan], device="cpu")

    assert there.test is not None and here.test is not None
    assert there.test.value("dice") == pytest.approx(here.test.value("dice"), abs=0.02)
    for name, tensor in there.params.items():
        torch.testing.assert_close(tensor, here.params[name], rtol=1e-3, atol=1e-4)
    assert (found.mask == expected.mask).mean() > 0.98
    assert there.summary["status"] == "done"


def test_mps_computes_in_float32_and_says_what_it_leaves_out(
    monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    asked = ComputeSettings(
        device="mps", precision="bfloat16", memory_format="channels_last", compile="full", micro_batch=2
    )
    with fake_mps(monkeypatch), caplog.at_level(logging.WARNING):
        compute = choose(asked)
        plain = choose(ComputeSettings(device="mps"))

    assert compute == plain.__class__(**{**vars(plain), "micro_batch": 2})
    assert compute.precision == "float32" and not compute.channels_last and compute.compile == "off"
    assert "no float64" in compute.why
    assert [record.args[0] for record in caplog.records] == ["precision", "memory_format", "compile"]  # type: ignore[index]


def test_the_evidential_loss_has_no_float64_on_mps(monkeypatch: MonkeyPatch) -> None:
    evidence = torch.rand(2, 3, 4, 4) * 20
    with fake_mps(monkeypatch):
        on_mps = dirichlet_kl(evidence.to("mps"))
        assert isinstance(on_mps, MpsTensor) and on_mps.dtype == torch.float32
        found = on_mps.cpu()

    torch.testing.assert_close(found, dirichlet_kl(evidence).float(), rtol=1e-4, atol=1e-4)


def test_a_device_that_is_not_here_is_refused() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="finds no GPU of Apple's here"):
            choose_device(ComputeSettings(device="mps"))
    for name in ("xpu", "gpu", "meta"):
        with pytest.raises(ConfigError, match=f"'{name}'; use auto, cpu, cuda, cuda:0 or mps"):
            choose_device(ComputeSettings(device=name))


# AMD's GPUs


@pytest.fixture
def rocm(monkeypatch: MonkeyPatch) -> None:
    """One GPU of AMD's, as PyTorch shows it: `torch.cuda`, and a version of HIP."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(instance_norm.importlib.util, "find_spec", lambda name: object())
    instance_norm.has_kernels.cache_clear()
    yield
    instance_norm.has_kernels.cache_clear()


@pytest.mark.usefixtures("rocm")
def test_rocm_is_a_cuda_device_without_our_kernels_graphs_and_service() -> None:
    settings = ComputeSettings(device="auto")
    config = wr.load_config({"model": {"name": "unet2d", "base_filters": 8, "levels": 4}})
    compute = choose(settings, build_model(config), (64, 64), 8, steps=100_000)

    assert compute.device.type == "cuda" and compute.precision == "bfloat16" and compute.channels_last
    assert compute.compile == "off"
    assert choose(ComputeSettings(compile="graphs")).compile == "off"
    assert choose(ComputeSettings(compile="full")).compile == "inductor"  # as asked: PyTorch's own kernels
    assert not instance_norm.has_kernels()
    assert not share_one_gpu([config])
