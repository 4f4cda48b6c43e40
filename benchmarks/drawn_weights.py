"""Does it matter that SAFCF compares features of drawn weights with features of mean weights?

    python benchmarks/drawn_weights.py --steps 10 100

Behind a variational stem the model in training draws weights; the received and the previous model have mean
weights. Two clients (phantoms, 2D and 3D) train a small U-Net with Dice, their mean is the received model,
and the first client trains it on for a tenth of the steps. Then, on cases that client trained on:

    cosine      of one model's features with drawn and with mean weights, over draws and cases
    beta        Eq. 5 with drawn weights against Eq. 5 with mean weights: mean difference, draws and cases
    gradient    of the margin form, for the encoder: cosine of the mean over draws and that of mean weights,
                and the ratio of their lengths
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wardround.data.phantom.cases import PhantomSettings, make_case, make_hospital
from wardround.methods.safcf import contrastive, modified_dice
from wardround.models import ModelSettings, build
from wardround.models.base import Segmenter

BATCH = 8


@dataclass(frozen=True)
class Client:
    images: Tensor  # (N, 1, *spatial)
    labels: Tensor


def make_client(dimensions: int, number: int, cases: int) -> Client:
    settings = PhantomSettings(dimensions=dimensions, size=64 if dimensions == 2 else 16)
    hospital = make_hospital(settings, number, seed=42)
    made = [make_case(settings, hospital, case, 42) for case in range(1, cases + 1)]
    return Client(torch.stack([case.image for case in made]), torch.stack([case.label for case in made]))


def train(model: Segmenter, client: Client, steps: int, seed: int) -> Segmenter:
    """A copy after so many steps of Adam on Dice, with drawn weights."""
    model = copy.deepcopy(model).train()
    optimizer, draw = torch.optim.Adam(model.parameters(), 1e-3), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randperm(len(client.images), generator=draw)[:BATCH]
        loss = modified_dice(model(client.images[chosen]), client.labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def average(models: Sequence[Segmenter]) -> Segmenter:
    result = copy.deepcopy(models[0])
    states = [model.state_dict() for model in models]
    result.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
    return result


def measure(dimensions: int, seed: int, steps: int, draws: int) -> dict[str, float]:
    torch.manual_seed(seed)
    clients = [make_client(dimensions, number, 24) for number in range(2)]
    settings = ModelSettings(
        name=f"unet{dimensions}d", base_filters=8, levels=3, norm="instance", stem="variational"
    )
    start = build(settings, in_channels=1, num_outputs=1, dimensions=dimensions)
    previous, other = (train(start, client, steps, seed) for client in clients)
    received = average([previous, other])
    model = train(received, clients[0], steps // 10, seed + 1)
    images = clients[0].images[:BATCH]
    with torch.no_grad():
        h_p, h_s = previous.eval().encode(images), received.eval().encode(images)

    def look(drawn: bool) -> tuple[Tensor, Tensor, Tensor]:
        h_c = model.train(drawn).encode(images)
        found = contrastive(h_c, h_p, h_s, form="margin")
        return (
            h_c.detach().flatten(1),
            found.beta.detach().flatten(),
            encoder_gradient(model, found.losses.mean()),
        )

    mean_features, mean_beta, mean_gradient = look(drawn=False)
    many = [look(drawn=True) for _ in range(draws)]
    cosines = torch.stack([torch.cosine_similarity(features, mean_features) for features, _, _ in many])
    gradient = torch.stack([own for _, _, own in many]).mean(dim=0)
    return {
        "cosine_least": float(cosines.min()),
        "cosine": float(cosines.mean()),
        "beta": float((torch.stack([beta for _, beta, _ in many]) - mean_beta).abs().mean()),
        "beta_size": float(mean_beta.abs().mean()),
        "gradient_cosine": float(torch.cosine_similarity(gradient, mean_gradient, dim=0)),
        "gradient_length": float(gradient.norm() / mean_gradient.norm()),
    }


def encoder_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Of all weights that the loss reaches but the spread of those that are drawn, as one vector."""
    weights = [value for name, value in model.named_parameters() if not name.endswith("rho")]
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return torch.cat([own.flatten() for own in found if own is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[10], help="of each of the two clients")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    everything = {}
    for steps in options.steps:
        found = [
            measure(dimensions, seed, steps, options.draws)
            for dimensions in (2, 3)
            for seed in range(1, options.seeds + 1)
        ]
        ranges = {key: [round(pick(one[key] for one in found), 4) for pick in (min, max)] for key in found[0]}
        everything[f"{steps} steps"] = ranges
        if not options.json:
            print(
                f"{steps} steps:", ", ".join(f"{key} {low} to {high}" for key, (low, high) in ranges.items())
            )
    if options.json:
        print(json.dumps(everything))


if __name__ == "__main__":
    main()
