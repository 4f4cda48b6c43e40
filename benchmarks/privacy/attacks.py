"""What an organiser can learn about the cases of four hospitals, by what it sees of their answers.

    python benchmarks/privacy/attacks.py phantom --out DIR
    python benchmarks/privacy/attacks.py polyp --data DATA --out DIR     # DATA holds polyp4

What is seen: every answer alone, without privacy or with client-level privacy; or, as under secure summation,
the mean of the four alone, rounded to multiples of 2^-28, without noise or with client-level noise that the
hospitals share, so that the mean has it once. The attacks are the same for all.

Inversion: the update of one case after one step of gradient descent is its gradient, times the rate. The
attacker knows the model that was sent and the cases' labels, and looks for the images whose gradient points
the same way (Geiping et al., NeurIPS 2020, https://arxiv.org/abs/2003.14053: cosine distance and total
variation, signed Adam). From the plain mean it looks for each image by itself and for all four together, and
the better one counts, as if it knew which; from the noised mean for all four together. SSIM and PSNR of what
is found against the true image; pictures in DIR. This is the attacker's best case, which the default rules of
a hospital refuse (min_cases, min_batch).

Membership: every hospital trains for many epochs; the attacker guesses that cases with a low loss in the
model that it sees were trained on (Yeom et al., CSF 2018, https://arxiv.org/abs/1709.01604). AUC over a
hospital's training cases and as many others of it; 0.5 is guessing.

Cases, weights and trained cases differ by seed. Finished seeds are kept in DIR; the table is made from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from monai.metrics import PSNRMetric, SSIMMetric
from PIL import Image
from scipy.stats import rankdata
from torch import Tensor

from wardround.config_file import load_config
from wardround.data.cases import Batch, TensorSplit
from wardround.data.federation_file import FederationFile, Source, write
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.params import Params
from wardround.privacy.accountant import calibrate_noise
from wardround.privacy.noise import add_noise, clip_factor
from wardround.seeding import generator

HOSPITALS = {
    "phantom": ("north", "east", "south", "west"),
    "polyp": ("kvasir", "etis", "cvc_colondb", "cvc_clinicdb"),
}
CLIP, EPSILON, DELTA = 1.0, 8.0, 1e-5
PRIVATE = {"level": "client", "epsilon": EPSILON, "delta": DELTA, "clip": CLIP, "scores": "show"}
INVERSION = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "local_steps": 1, "batch_size": 1}
MEMBERSHIP = {"optimizer": {"learning_rate": 0.01}, "batch_size": 4}
Update = Mapping[str, Tensor]


# Hospitals and what is seen of them


@contextmanager
def open_host(options: argparse.Namespace, seed: int, **changes: Any) -> Iterator[Host]:
    names = HOSPITALS[options.set]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data: dict[str, Any] = {"phantom": {"hospitals": 4, "size": options.size, "cases": 60, "seed": 1}}
        if options.set == "polyp":
            sources = (Source(path=(options.data / "polyp4").resolve()),)
            write(FederationFile(sources=sources, labels={"polyp": (1,)}), folder / "federation.yaml")
            data = {"federation": str(folder / "federation.yaml"), "prepare": {"size": [options.size] * 2}}
        settings = {
            "seed": seed,
            "rounds": 1,
            "data": data,
            "model": {"name": "unet2d", "base_filters": options.filters, "levels": 2},
            "augmentation": {"flip": 0.0, "intensity": 0.0},
            "compute": {"threads": 1, "workers": 1, "device": "cpu"},
            **changes,
        }
        yield Host(load_config(settings), folder / "run" / "clients", list(names))


def choose_cases(host: Host, name: str, seed: int, count: int) -> Batch:
    """Some training cases of a hospital."""
    split = host.client(name).data.train
    order = torch.randperm(len(split), generator=generator(seed, "attack", name))
    assert len(split) >= count, f"{name} has {len(split)} training cases, not {count}"
    return split.batch(order[:count].tolist())


def answer_of(host: Host, name: str, cases: Batch) -> tuple[Params, Update]:
    """The model that is sent to a hospital with these cases alone, and the update that leaves it."""
    client = host.client(name)
    spacing = client.data.train.spacing(0)
    names = [str(n) for n in range(len(cases))]
    split = TensorSplit(names, cases.image, cases.label, [spacing] * len(cases))
    whole, client.data = client.data, replace(client.data, train=split)
    sent = Params.of(host.bench.model)
    answer = host.run(name, "train", 0, Message(params=sent))
    client.data = whole
    sent.load_into(host.bench.model)
    assert answer.failure is None, answer.failure
    trained = answer.message.params
    return sent, {key: trained[key] - sent[key] for key in Params.trainable(host.bench.model)}


def sum_securely(updates: list[Update], shared_noise: bool) -> Update:
    """What secure summation shows of updates of equal weight.

    shared_noise: client-level noise, once in the sum.
    """
    factors, deviation = [1.0] * len(updates), 0.0
    if shared_noise:
        factors = [clip_factor(list(update.values()), CLIP) for update in updates]
        noise = calibrate_noise([], 1.0, 1, EPSILON, DELTA)
        assert noise is not None
        deviation = noise * 2 * CLIP
    mean = {}
    for key in updates[0]:
        total = sum(factor * update[key].double() for factor, update in zip(factors, updates, strict=True))
        noised = add_noise(total, deviation) / len(updates)
        mean[key] = ((noised * 2.0**28).round() / 2.0**28).float()
    return mean


# Inversion


def invert(host: Host, sent: Params, update: Update, label: Tensor, shape: Any, steps: int) -> Tensor:
    """The images of these labels whose gradient points along the update."""
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
        loss = host.objective.sample_losses(model(image), label).mean()
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


def attack_images(options: argparse.Namespace, seed: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """For each thing seen, the true image of every hospital and what was found of it."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    names = HOSPITALS[options.set]
    seen: dict[str, list[Update]] = {}
    for title, privacy in (("no privacy", {"level": "none"}), ("client level", PRIVATE)):
        with open_host(options, seed, privacy=privacy, **INVERSION) as host:
            cases = [choose_cases(host, name, seed, 1) for name in names]
            answers = [answer_of(host, name, case) for name, case in zip(names, cases, strict=True)]
            seen[title] = [update for _, update in answers]
            sent, shape = answers[0][0], cases[0].image.shape

            def find(update: Update, case: Batch, host: Host = host, sent: Params = sent) -> Tensor:
                return invert(host, sent, update, case.label, case.image.shape, options.steps)

            alone = [find(update, case) for update, case in zip(seen[title], cases, strict=True)]
            found[title] = [(case.image, image) for case, image in zip(cases, alone, strict=True)]
            if title != "no privacy":
                continue
            images, labels = (torch.cat([getattr(c, kind) for c in cases]) for kind in ("image", "label"))
            together = replace(cases[0], image=images, label=labels)
            total = sum_securely(seen[title], shared_noise=False)
            pairs = zip(cases, [find(total, case) for case in cases], find(total, together), strict=True)
            found["secure sum"] = [
                (c.image, max(one, many.reshape(shape), key=lambda i, c=c: compare(i, c.image)["ssim"]))
                for c, one, many in pairs
            ]
            noised = find(sum_securely(seen[title], shared_noise=True), together)
            found["secure sum, client level"] = list(zip(images.split(1), noised.split(1), strict=True))
    return found


def draw_strip(found: dict[str, list[tuple[Tensor, Tensor]]], place: int) -> Image.Image:
    """One hospital's image, then what was found of it by each thing seen."""
    parts = [next(iter(found.values()))[place][0], *(pairs[place][1] for pairs in found.values())]
    whole = Image.new("RGB", (168 * len(parts) - 8, 160), "white")
    for column, part in enumerate(parts):
        image = (part[0] - part.min()) / (part.max() - part.min() + 1e-9)
        pixels = (255 * image[:3].expand(3, -1, -1).permute(1, 2, 0)).byte().numpy()
        square = Image.fromarray(pixels).resize((160, 160), Image.Resampling.NEAREST)
        whole.paste(square, (168 * column, 0))
    return whole


# Membership


def attack_members(options: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """For each thing seen, the AUC at every hospital."""
    names, half = HOSPITALS[options.set], options.members
    found: dict[str, list[float]] = {}
    for title, privacy in (("no privacy", {"level": "none"}), ("client level", PRIVATE)):
        with open_host(options, seed, privacy=privacy, local_epochs=options.epochs, **MEMBERSHIP) as host:
            cases = [choose_cases(host, name, seed, 2 * half) for name in names]
            trained = [case.part(0, half) for case in cases]
            answers = [answer_of(host, name, case) for name, case in zip(names, trained, strict=True)]
            sent, updates = answers[0][0], [update for _, update in answers]
            views = {title: updates}
            if title == "no privacy":
                for name, shared_noise in (("secure sum", False), ("secure sum, client level", True)):
                    views[name] = [sum_securely(updates, shared_noise)] * len(names)
            for view, those in views.items():
                pairs = zip(those, cases, strict=True)
                found[view] = [guess_members(host, sent, update, case, half) for update, case in pairs]
    return found


def guess_members(host: Host, sent: Params, update: Update, cases: Batch, half: int) -> float:
    """AUC of low losses for the first half of the cases, which was trained on."""
    model = host.bench.model
    sent.updated({name: sent[name] + change for name, change in update.items()}).load_into(model)
    model.eval()
    with torch.no_grad():
        losses = host.objective.sample_losses(model(cases.image), cases.label)
    ranks = rankdata(-torch.nan_to_num(losses, nan=1e9).numpy())
    return float((ranks[:half].sum() - half * (half + 1) / 2) / half**2)


def score_images(options: argparse.Namespace, seed: int) -> dict[str, dict[str, list[float]]]:
    """SSIM and PSNR of every hospital's image, for each thing seen."""
    images = attack_images(options, seed)
    rows = {}
    for title, pairs in images.items():
        scores = [compare(found, truth) for truth, found in pairs]
        rows[title] = {kind: [score[kind] for score in scores] for kind in ("ssim", "psnr")}
    best = max(range(4), key=lambda place: rows["no privacy"]["ssim"][place])
    draw_strip(images, best).save(options.out / f"privacy-inversion-{options.set}-{seed}.png")
    return rows


def score_members(options: argparse.Namespace, seed: int) -> dict[str, dict[str, list[float]]]:
    return {title: {"auc": values} for title, values in attack_members(options, seed).items()}


def print_table(found: dict[str, Any]) -> None:
    print("| seen | SSIM | best | PSNR | membership AUC | best |\n|---|---|---|---|---|---|")
    for title in ("no privacy", "client level", "secure sum", "secure sum, client level"):
        cells = []
        for kind in ("ssim", "psnr", "auc"):
            lists = [rows[title][kind] for rows in found.values() if kind in rows[title]]
            values = [value for values in lists for value in values]
            cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})")
            if kind != "psnr":
                cells.append(f"{max(values):.2f}")
        print(f"| {title} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=HOSPITALS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--members", type=int, default=18, help="training cases of a hospital")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"attacks-{options.set}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in options.seeds:
        for kind, score in (("members", score_members), ("images", score_images)):
            if f"{kind}/{seed}" not in found:
                found[f"{kind}/{seed}"] = score(options, seed)
                kept.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)


if __name__ == "__main__":
    main()
