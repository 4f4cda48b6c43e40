"""What an organiser can learn from one hospital's answer, with and without client-level privacy.

    python benchmarks/privacy/attacks.py phantom --out DIR
    python benchmarks/privacy/attacks.py polyp --data DATA --out DIR     # DATA holds polyp4

Inversion: the update of one case after one step of gradient descent is its gradient, times the rate. The
attacker knows the model that was sent and the case's label, and looks for the image whose gradient points the
same way (Geiping et al., NeurIPS 2020, https://arxiv.org/abs/2003.14053: cosine distance and total variation,
signed Adam). SSIM and PSNR of what is found against the true image; pictures in DIR. This is the attacker's
best case, which the default rules of a hospital refuse (min_cases, min_batch).

Membership: a model is trained by one hospital for many epochs; the attacker has the answer and guesses that
cases with a low loss were trained on (Yeom et al., CSF 2018, https://arxiv.org/abs/1709.01604). AUC over
training cases and as many others; 0.5 is guessing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from monai.metrics import PSNRMetric, SSIMMetric
from PIL import Image
from scipy.stats import rankdata
from torch import Tensor

from wardround.config_file import load_config
from wardround.data.cases import TensorSplit
from wardround.data.federation_file import FederationFile, Source, write
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.params import Params


def open_host(options: argparse.Namespace, folder: Path, **changes: Any) -> Host:
    data: dict[str, Any] = {"phantom": {"hospitals": 1, "size": options.size, "cases": 60, "seed": 1}}
    name = "north"
    if options.set == "polyp":
        sources = (Source(path=(options.data / "polyp4").resolve()),)
        write(FederationFile(sources=sources, labels={"polyp": (1,)}), folder / "federation.yaml")
        data = {"federation": str(folder / "federation.yaml"), "prepare": {"size": [options.size] * 2}}
        name = "etis"
    settings = {
        "seed": options.seed,
        "data": data,
        "model": {"name": "unet2d", "base_filters": options.filters, "levels": 2},
        "augmentation": {"flip": 0.0, "intensity": 0.0},
        "compute": {"threads": 1, "workers": 1, "device": "cpu"},
        **changes,
    }
    return Host(load_config(settings), folder / "run" / "clients", [name])


def answer_of(host: Host, num_cases: int) -> tuple[Params, Params]:
    """The model that was sent and the one that came back, of a hospital with its first cases alone."""
    client = host.client(host.names[0])
    client.data = replace(client.data, train=first_cases(client.data.train, num_cases))
    sent = Params.of(host.bench.model)
    answer = host.run(client.name, "train", 0, Message(params=sent))
    assert answer.failure is None, answer.failure
    return sent, answer.message.params


def first_cases(split: Any, count: int) -> Any:
    batch = split.batch(range(count))
    return TensorSplit(
        split.names[:count], batch.image, batch.label, [split.spacing(n) for n in range(count)]
    )


# Inversion


def loss_of(host: Host, logits: Tensor, label: Tensor) -> Tensor:
    return host.objective.sample_losses(logits, label).mean()


def invert(
    host: Host, sent: Params, update: dict[str, Tensor], label: Tensor, shape: Any, steps: int
) -> Tensor:
    """The image whose gradient points along the update."""
    model = host.bench.model
    sent.load_into(model)
    model.train()
    named = [(name, p) for name, p in model.named_parameters() if name in update]
    wanted = [-update[name] for name, _ in named]
    image = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    optimizer = torch.optim.Adam([image], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(host, model(image), label)
        found = torch.autograd.grad(loss, [p for _, p in named], create_graph=True)
        dot = sum((a * b).sum() for a, b in zip(found, wanted, strict=True))
        norms = [sum(t.square().sum() for t in those).sqrt() for those in (found, wanted)]
        variation = image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()
        (1 - dot / (norms[0] * norms[1] + 1e-12) + 0.01 * variation).backward()
        assert image.grad is not None
        image.grad.sign_()
        optimizer.step()
        schedule.step()
    return image.detach()


def compare(found: Tensor, truth: Tensor) -> dict[str, float]:
    """SSIM and PSNR after the found image is brought to the truth's mean and spread, as an attacker would."""
    scaled = (found - found.mean()) / (found.std() + 1e-9) * truth.std() + truth.mean()
    low, high = float(truth.min()), float(truth.max())
    a, b = ((t.clamp(low, high) - low) / (high - low) for t in (scaled, truth))
    ssim = SSIMMetric(spatial_dims=2, data_range=1.0, win_size=7)(a, b)
    return {"ssim": float(ssim.mean()), "psnr": float(PSNRMetric(max_val=1.0)(a, b).mean())}


def picture(tensor: Tensor) -> Image.Image:
    image = tensor[0].float()
    image = (image - image.min()) / (image.max() - image.min() + 1e-9)
    image = image.expand(3, -1, -1) if len(image) == 1 else image[:3]
    pixels = (255 * image.permute(1, 2, 0)).byte().numpy()
    return Image.fromarray(pixels).resize((160, 160), Image.Resampling.NEAREST)


def attack_images(
    options: argparse.Namespace, privacy: dict[str, Any]
) -> tuple[list[dict[str, float]], list[Any]]:
    scores, pictures = [], []
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
            "local_steps": 1,
            "batch_size": 1,
            "rounds": 1,
        }
        host = open_host(options, Path(folder), privacy=privacy, **changes)
        sent, received = answer_of(host, 1)
        batch = host.client(host.names[0]).data.train.batch([0])
        names = Params.trainable(host.bench.model)
        update = {name: received[name] - sent[name] for name in names}
        found = invert(host, sent, update, batch.label, batch.image.shape, options.steps)
        scores.append(compare(found, batch.image))
        pictures += [picture(batch.image), picture(found)]
    return scores, pictures


# Membership


def attack_members(options: argparse.Namespace, privacy: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "optimizer": {"learning_rate": 0.01},
            "local_epochs": options.epochs,
            "batch_size": 4,
            "rounds": 1,
        }
        host = open_host(options, Path(folder), privacy=privacy, **changes)
        client = host.client(host.names[0])
        everyone = client.data.train
        half = len(everyone) // 2 if options.set == "phantom" else 20
        _, received = answer_of(host, half)
        received.load_into(host.bench.model)
        host.bench.model.eval()
        batch = everyone.batch(range(2 * half))
        with torch.no_grad():
            losses = host.objective.sample_losses(host.bench.model(batch.image), batch.label)
        losses = torch.nan_to_num(losses, nan=1e9)
        ranks = rankdata(-losses.numpy())
        return float((ranks[:half].sum() - half * (half + 1) / 2) / half**2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=("phantom", "polyp"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    private = {"level": "client", "epsilon": 8.0, "clip": 1.0, "scores": "show"}
    rows, strip = {}, []
    for title, privacy in (("none", {"level": "none"}), ("client level, epsilon 8", private)):
        (score,), pictures = attack_images(options, privacy)
        strip += pictures if not strip else pictures[1:]
        rows[title] = {**score, "membership_auc": attack_members(options, privacy)}
        print(title, rows[title], flush=True)
    whole = Image.new("RGB", (160 * len(strip) + 8 * (len(strip) - 1), 160), "white")
    for place, part in enumerate(strip):
        whole.paste(part, (168 * place, 0))
    whole.save(options.out / f"privacy-inversion-{options.set}.png")
    (options.out / f"attacks-{options.set}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
