"""FedProto: golden numbers, a derivation by hand, absent classes, the off switch, whole runs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import Tensor

from wardround.clients import Answer
from wardround.data.opening import open_federation
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.contrastive_objectives import probe_output
from wardround.messages import Message
from wardround.methods.fedproto import average_classes, class_sums, distance, is_usable, join_prototypes
from wardround.params import Params

GOLDEN = vectors("fedproto")
STILL = {"name": "sgd", "learning_rate": 0.0}
AS_IT_IS = {"flip": 0.0, "intensity": 0.0}
BOTH = torch.tensor([True, True])


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def held(means: Mapping[str, Any], counts: Mapping[str, int] | None = None, num_classes: int = 2) -> Params:
    """Prototypes by class as a client sends them; without counts every class it has counts 7."""
    width = len(next(iter(means.values())))
    rows = [means.get(str(j), [0.0] * width) for j in range(num_classes)]
    given = counts or dict.fromkeys(means, 7)
    return Params(
        {"means": tensor(rows), "counts": tensor([given.get(str(j), 0) for j in range(num_classes)])}
    )


def nothing(num_classes: int = 2, width: int = 2) -> Params:
    return Params({"means": tensor([[0.0] * width] * num_classes), "counts": tensor([0.0] * num_classes)})


# Golden numbers


def test_masked_averages_are_the_golden_ones() -> None:
    inputs, expected = GOLDEN["masked_average"]["inputs"], GOLDEN["masked_average"]["expected"]
    features, label = tensor(inputs["features_chw"])[None], torch.tensor(inputs["labels_hw"])[None]
    sums, counts = class_sums(features, label, num_classes=2)
    for j, prototype in expected["prototypes"].items():
        assert (sums / counts[:, None])[int(j)].tolist() == pytest.approx(prototype, abs=1e-6)
        assert counts[int(j)] == expected["count"][j]


@pytest.mark.parametrize("name", ["server_pixel_weighted", "server_uniform_over_holders"])
def test_the_servers_prototypes_are_the_golden_ones(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]["global"]
    counts = inputs.get("client_counts", [None] * len(inputs["client_prototypes"]))
    sent = [held(*pair) for pair in zip(inputs["client_prototypes"], counts, strict=True)]
    means = join_prototypes(sent, nothing(), by_voxels="client_counts" in inputs)["means"]
    for j, prototype in expected.items():
        assert means[int(j)].tolist() == pytest.approx(prototype, abs=1e-6)


def test_the_distance_is_the_golden_one() -> None:
    inputs, expected = GOLDEN["mse_loss"]["inputs"], GOLDEN["mse_loss"]["expected"]
    value = distance(held(inputs["local"])["means"], held(inputs["global"])["means"], BOTH, "mse")
    assert float(value) == pytest.approx(expected["loss_mean_over_present_classes"], abs=1e-6)


# By hand


def test_a_round_by_hand() -> None:
    """One feature, one row of four voxels a case.

    Client A, batch 1: f = 1 2 3 4, y = 0 0 1 1; batch 2: f = 5 6 7 8, y = 0 1 1 1.
      class 0: (1 + 2 + 5) / 3 = 8/3 from 3 voxels, class 1: (3 + 4 + 6 + 7 + 8) / 5 = 28/5 from 5.
      A mean of batch means would be (1.5 + 5) / 2 = 3.25 instead of 8/3.
    Client B: f = 10 10 10 0, y = 0 0 0 0: class 0: 30/4 from 4 voxels, no class 1.
    Server by voxels: class 0: (8 + 30) / (3 + 4) = 38/7, class 1: 28/5.
    Server alike: class 0: (8/3 + 30/4) / 2 = 61/12, class 1: 28/5.
    A's next batch 1: C_0 = 1.5, C_1 = 3.5: ((1.5 - 38/7)² + (3.5 - 28/5)²) / 2.
    B's next batch has class 0 alone: (7.5 - 38/7)².
    """
    one = class_sums(tensor([[[1, 2, 3, 4]]]), torch.tensor([[0, 0, 1, 1]]), 2)
    two = class_sums(tensor([[[5, 6, 7, 8]]]), torch.tensor([[0, 1, 1, 1]]), 2)
    other = class_sums(tensor([[[10, 10, 10, 0]]]), torch.tensor([[0, 0, 0, 0]]), 2)
    a, b = average_classes([one, two]), average_classes([other])
    assert a["means"][:, 0].tolist() == pytest.approx([8 / 3, 28 / 5]) and a["counts"].tolist() == [3, 5]
    assert b["means"][:, 0].tolist() == pytest.approx([7.5, 0]) and b["counts"].tolist() == [4, 0]

    server = join_prototypes([a, b], nothing(width=1), by_voxels=True)
    assert server["means"][:, 0].tolist() == pytest.approx([38 / 7, 28 / 5], rel=1e-6)
    alike = join_prototypes([a, b], nothing(width=1), by_voxels=False)
    assert alike["means"][:, 0].tolist() == pytest.approx([61 / 12, 28 / 5], rel=1e-6)

    local = one[0] / one[1][:, None]
    expected = ((1.5 - 38 / 7) ** 2 + (3.5 - 28 / 5) ** 2) / 2
    assert float(distance(local, server["means"], one[1] > 0, "mse")) == pytest.approx(expected, rel=1e-6)
    local = other[0] / other[1].clamp_min(1)[:, None]
    expected = (7.5 - 38 / 7) ** 2
    assert float(distance(local, server["means"], other[1] > 0, "mse")) == pytest.approx(expected, rel=1e-6)


def test_two_rounds_of_a_model_that_stands_still_agree_with_plain_numpy(tmp_path: Path) -> None:
    """Prototypes over all training voxels of every client, and the second round's term, loop by loop."""
    changes = {"optimizer": STILL, "augmentation": AS_IT_IS, "batch_size": 16, "local_epochs": 2}
    result = run(tmp_path / "run", method={"name": "fedproto", "lam": 3.0}, **changes)
    model = build_model(result.config).eval()
    federation = open_federation(result.config.data, result.config.seed)

    sums, counts, by_client = np.zeros((2, 2)), np.zeros(2), {}
    for name in federation.names:
        train = federation.load(name).train
        cases = train.batch(range(len(train)))
        with torch.no_grad():
            features = model.forward_features(cases.image).decoder
        assert features is not None
        f, y = features.double().numpy(), cases.label.numpy()
        own = [f.transpose(0, 2, 3, 1)[y == j] for j in (0, 1)]
        by_client[name] = [part.mean(axis=0) for part in own]
        sums += [part.sum(axis=0) for part in own]
        counts += [len(part) for part in own]

    found = result.outcome.state.memory["prototypes"]
    assert found["means"].numpy() == pytest.approx(sums / counts[:, None], rel=1e-5)
    for name, prototypes in by_client.items():
        gaps = [((prototypes[j] - sums[j] / counts[j]) ** 2).mean() for j in (0, 1)]
        expected = pytest.approx(3.0 * float(np.mean(gaps)), rel=1e-4)
        assert result.records[1]["loss"][name]["prototypes"] == expected


# Absent classes and bad replies


def test_a_class_absent_from_the_batch_has_no_term_and_no_gradient() -> None:
    features = torch.rand(1, 3, 2, 2).requires_grad_()
    sums, counts = class_sums(features, torch.zeros(1, 2, 2, dtype=torch.long), 2)
    local = sums / counts.clamp_min(1)[:, None]
    received = torch.rand(2, 3).double()
    value = distance(local, received, counts > 0, "mse")
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == pytest.approx(float((local[0] - received[0]).square().mean().detach()))
    assert features.grad is not None and bool(features.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["mse", "kl"])
def test_no_class_in_common_gives_zero(kind: Any) -> None:
    local = torch.rand(2, 3).requires_grad_()
    value = distance(local, torch.rand(2, 3), torch.tensor([False, False]), kind)
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == 0 and local.grad is not None and not local.grad.any()


def test_a_class_nobody_has_keeps_its_last_prototype() -> None:
    last = held({"0": [1.0, 1.0], "1": [5.0, 6.0]})
    after = join_prototypes([held({"0": [3.0, 3.0]})], last, by_voxels=True)
    assert after["means"].tolist() == [[3.0, 3.0], [5.0, 6.0]]
    assert (after["counts"] > 0).all()
    assert join_prototypes([], last, by_voxels=True)["means"].tolist() == last["means"].tolist()


def test_the_divergence_of_equal_prototypes_is_zero_and_positive_otherwise() -> None:
    p = tensor([[1.0, 2.0], [0.0, 0.0]])
    assert float(distance(p, p, BOTH, "kl")) == pytest.approx(0)
    # softmax(0, ln 3) = (1/4, 3/4) against (1/2, 1/2): 1/2 ln 2 + 1/2 ln(2/3)
    local, target = tensor([[0.0, math.log(3)]]), tensor([[0.0, 0.0]])
    assert float(distance(local, target, BOTH[:1], "kl")) == pytest.approx(
        math.log(2) / 2 + math.log(2 / 3) / 2
    )


def test_prototypes_that_do_not_fit_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = nothing()
    assert is_usable(held({"0": [1.0, 2.0]}), known)
    assert not is_usable(None, known) and not is_usable(Params(), known)
    assert not is_usable(held({"0": [1.0, 2.0, 3.0]}), known)
    assert not is_usable(held({"0": [1.0, 2.0]}, {"0": -1}), known)
    assert not is_usable(held({"0": [1.0, 2.0]}, {"0": 1e300}), known)  # its mean would be infinite
    for kind in (torch.complex64, torch.int64):
        assert not is_usable(Params({name: known[name].to(kind) for name in known}), known)

    def wrong(answer: Answer) -> Answer:
        return replace(answer, message=replace(answer.message, extras={"prototypes": held({"0": [1.0]})}))

    spoil(monkeypatch, "east", wrong)
    result = run(tmp_path / "run", method={"name": "fedproto"})
    assert set(result.records[1]["weights"]) == {"east", "north", "south"}
    assert result.outcome.state.memory["prototypes"]["means"].shape == (2, 2)


# Whole runs


def test_fedproto_with_lam_zero_is_fedavg(tmp_path: Path) -> None:
    fedproto = run(tmp_path / "fedproto", method={"name": "fedproto", "lam": 0.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})
    assert fedproto.params_sha256 == fedavg.params_sha256
    up = [
        sum(record["exchanges"][0]["bytes_up"].values()) for r in (fedproto, fedavg) for record in r.records
    ]
    assert len(set(up)) == 1


def test_the_first_round_has_no_term_and_the_second_one_has(tmp_path: Path) -> None:
    fedproto = run(tmp_path / "fedproto", method={"name": "fedproto"})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})
    first, second = ([loss.get("prototypes") for loss in r["loss"].values()] for r in fedproto.records)
    assert first == [None] * 3 and min(second) > 0
    assert fedproto.records[0]["validation"] == fedavg.records[0]["validation"]
    assert fedproto.params_sha256 != fedavg.params_sha256


def test_what_is_added_to_the_traffic_is_one_vector_and_one_count_a_class(tmp_path: Path) -> None:
    fedproto = run(tmp_path / "fedproto", method={"name": "fedproto"})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})
    width = probe_output(build_model(fedavg.config)).decoder.shape[1]  # type: ignore[union-attr]
    added = 2 * width * 4 + 2 * 8
    for direction, rounds in (("bytes_up", (0, 1)), ("bytes_down", (1,))):
        for number in rounds:
            plain = fedavg.records[number]["exchanges"][0][direction]["north"]
            assert fedproto.records[number]["exchanges"][0][direction]["north"] == plain + added


def personal(result: Any) -> dict[str, str]:
    names = list(open_federation(result.config.data, result.config.seed).names)
    host = Host(result.config, result.folder / "clients", names)
    ask = Message(params=result.outcome.state.params)
    answers = [host.run(name, "personal_model", 9, ask) for name in names]
    return {answer.client: answer.message.extras["model"].sha256() for answer in answers}


def test_without_averaging_only_prototypes_travel_and_each_client_keeps_its_model(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=3, method={"name": "fedproto", "aggregate_weights": False})
    assert result.params_sha256 == Params.of(build_model(result.config)).sha256()
    assert len(set(personal(result).values())) == 3
    model = Params.of(build_model(result.config)).num_bytes
    for number, record in enumerate(result.records):
        (exchange,) = record["exchanges"]
        assert max(exchange["bytes_up"].values()) < 100
        assert [size > model / 2 for size in exchange["bytes_down"].values()] == [number == 0] * 3
        assert "weights" not in record
    assert min(loss["prototypes"] for loss in result.records[1]["loss"].values()) > 0


def test_without_averaging_and_lam_zero_it_is_local_training(tmp_path: Path) -> None:
    off = {"name": "fedproto", "aggregate_weights": False, "lam": 0.0}
    fedproto = run(tmp_path / "fedproto", participation=0.67, rounds=3, method=off)
    local = run(tmp_path / "local", participation=0.67, rounds=3, method={"name": "local"})
    assert personal(fedproto) == personal(local)


def test_clients_without_a_single_lesion_and_three_classes_train(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": [2, 6], "num_classes": 3}}
    result = run(
        tmp_path / "run", data=data, method={"name": "fedproto", "distance": "kl", "weighting": "uniform"}
    )
    assert result.outcome.state.memory["prototypes"]["means"].shape == (3, 2)
    assert all(math.isfinite(loss["total"]) for record in result.records for loss in record["loss"].values())


@pytest.mark.parametrize(("key", "value"), [("lam", -1), ("distance", "cosine"), ("weighting", "samples")])
def test_impossible_settings_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method.{key}"):
        config(tmp_path, method={"name": "fedproto", key: value})
