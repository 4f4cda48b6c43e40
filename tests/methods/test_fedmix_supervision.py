"""FedMix (mixed supervision): golden numbers, a derivation by hand, pseudo-labels, whole runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import Tensor

from wardround.aggregation.weights import normalise
from wardround.clients import Answer
from wardround.data.opening import open_federation
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.segmentation import dice_loss
from wardround.messages import Reply, ServerState
from wardround.methods.fedmix_supervision import (
    SECOND,
    FedMixSupervision,
    adaptive_weights,
    dice,
    find_allowed,
    get_second,
    keep_allowed,
    one_hot,
)
from wardround.params import Params

GOLDEN = vectors("fedmix_supervision")
STILL = {
    "optimizer": {"name": "sgd", "learning_rate": 0.0},
    "augmentation": {"flip": 0.0, "intensity": 0.0},
    "batch_size": 16,
}


def method(**changes: Any) -> dict[str, Any]:
    return {"name": "fedmix_supervision", **changes}


def first_network(params: Params) -> Params:
    return Params({name: params[name] for name in params if not name.startswith(SECOND)})


def label(*rows: str) -> Tensor:
    """One image a string: rows apart by blanks, a digit a voxel."""
    return torch.stack([torch.tensor([[int(v) for v in line] for line in row.split()]) for row in rows])


# Weights


@pytest.mark.parametrize("name", GOLDEN)
def test_the_weights_are_the_golden_ones(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    used, losses, beta = inputs["n_used"], inputs["loss"], inputs["beta"]
    weights = adaptive_weights(used, losses, inputs["lambda"], beta)
    assert weights == pytest.approx(expected["weights"], abs=1e-6)
    assert adaptive_weights(used, losses, 0, beta) == pytest.approx(expected["data_part"], abs=1e-6)
    # with a huge lambda only the losses are left
    assert adaptive_weights(used, losses, 1e12, beta) == pytest.approx(expected["loss_part"], abs=1e-6)


def test_weights_by_hand() -> None:
    """n' = 4, 1 and L = 1, 4, beta 1.5: counts 4/5, 1/5; powers 1, 4^1.5 = 8, so 1/9, 8/9.

    lambda 2: 4/5 + 2/9 = 46/45 and 1/5 + 16/9 = 89/45, together 3: 46/135 and 89/135.
    """
    assert adaptive_weights([4, 1], [1, 4], lam=2, beta=1.5) == pytest.approx([46 / 135, 89 / 135])


def test_weights_in_special_cases() -> None:
    assert adaptive_weights([3, 1], [0, 0], 10, 1.5) == [0.75, 0.25]  # all losses 0: counts alone
    assert adaptive_weights([4, 0, 4], [1, 9, 1], 10, 1.5) == [0.5, 0, 0.5]  # no accepted image: nothing
    assert adaptive_weights([0, 0], [1, 1], 10, 1.5) == [0.5, 0.5]  # nobody trained: the model stays anyway
    assert adaptive_weights([7], [0.3], 10, 1.5) == [1.0]
    assert adaptive_weights([1, 1], [1e300, 1.0], 10, 1.5) == pytest.approx([21 / 22, 1 / 22])
    assert adaptive_weights([3, 5], [0.2, 0.9], 0, 1.5) == normalise([3, 5])


def test_a_client_cannot_claim_more_images_than_it_registered() -> None:
    claims = [("a", 10**9, 4), ("b", 4, 4)]
    replies = [Reply(client=c, scalars={"num_used": n, "loss": 1.0}, num_examples=m) for c, n, m in claims]
    assert FedMixSupervision().weigh(ServerState(Params()), replies) == [0.5, 0.5]


# Weak annotations


def test_boxes_surround_every_connected_part_of_a_class() -> None:
    truth = label("11000 10000 00001 00011 00000")
    expected = label("11000 11000 00011 00011 00000")
    assert torch.equal(find_allowed(truth, "box", 2)[:, 0].long(), expected)
    both = find_allowed(label("1200 2200 0001 0000"), "box", 3)[0].long()
    assert torch.equal(both[0], label("1000 0000 0001 0000")[0])
    assert torch.equal(both[1], label("1100 1100 0000 0000")[0])


def test_boxes_of_an_empty_mask_and_of_a_volume() -> None:
    assert not find_allowed(torch.zeros(2, 4, 4, dtype=torch.long), "box", 2).any()
    volume = torch.zeros(1, 3, 3, 3, dtype=torch.long)
    volume[0, 0, 0, 0] = volume[0, 0, 0, 1] = volume[0, 0, 1, 1] = 1
    assert int(find_allowed(volume, "box", 2).sum()) == 4


def test_an_image_label_tells_only_whether_there_is_foreground() -> None:
    found = find_allowed(label("0000 0100", "0000 0000"), "image", 3)
    assert found[0].all() and not found[1].any()
    assert find_allowed(label("0000 0000"), "none", 3).all()


def test_a_label_outside_the_boxes_of_its_class_becomes_background() -> None:
    where = torch.stack([label("1100"), label("0110")], dim=1)[:, :, 0].bool()[:, :, None]
    assert keep_allowed(label("1221"), where).tolist() == label("1220").tolist()


def test_dice_of_masks() -> None:
    a, b = label("1100", "0000", "0000", "1200"), label("1000", "0000", "0001", "1100")
    # 2/3; two empty masks agree; one empty mask does not; classes 2/3 and 0
    assert dice(one_hot(a, 2), one_hot(b, 2))[:3].tolist() == pytest.approx([2 / 3, 1, 0])
    assert dice(one_hot(a, 3), one_hot(b, 3))[3:].tolist() == pytest.approx([1 / 3])


# Which images are used, by hand. The two networks agree in the first image and differ in the second.

Y_1 = label("0110 0110", "1100 0000", "0000 0000")
Y_2 = label("0110 0110", "1111 1111", "0000 0000")


def judged(kind: Any, truth: Tensor, **changes: Any) -> tuple[list[Any], list[Any], list[bool]]:
    y_1, y_2, accepted = FedMixSupervision(**changes).judge(Y_1, Y_2, truth, kind, 2)
    return y_1.tolist(), y_2.tolist(), accepted.tolist()


def test_without_any_annotation_agreement_decides_and_two_empty_masks_agree() -> None:
    truth = torch.zeros_like(Y_1)
    assert judged("none", truth)[2] == [True, False, True]  # Dice 1; 2·2/(2 + 8) = 0.4; 0/0
    assert judged("none", truth, agreement=0.4)[2] == [True, True, True]


def test_boxes_cut_the_masks_and_must_be_filled_by_half() -> None:
    truth = label("0111 0000", "1100 0000", "0010 0000")
    y_1, y_2, accepted = judged("box", truth)
    # image 1: cut to 0110, Dice with the box 2·2/(2 + 3) = 0.8; image 2: both cut to 1100, which is the box;
    # image 3: empty masks agree, but the box is not empty: Dice 0
    assert y_1 == label("0110 0000", "1100 0000", "0000 0000").tolist() == y_2
    assert accepted == [True, True, False]
    assert judged("box", truth, box_dice=0.81)[2] == [False, True, False]


def test_a_box_annotation_without_a_box_is_an_empty_mask() -> None:
    y_1, y_2, accepted = judged("box", torch.zeros_like(Y_1))
    assert accepted == [True] * 3 and not torch.tensor([y_1, y_2]).any()


def test_image_labels_empty_the_negative_ones_and_refuse_an_empty_mask_of_a_positive_one() -> None:
    truth = label("0000 0000", "1000 0000", "1000 0000")
    y_1, y_2, accepted = judged("image", truth)
    assert y_1[0] == y_2[0] == torch.zeros(2, 4).tolist()
    assert accepted == [True, False, False]
    assert judged("image", truth, agreement=0.0)[2] == [True, True, False]


# The two networks


def test_the_second_network_has_the_shape_of_the_first_and_other_weights(tmp_path: Path) -> None:
    plain = build_model(config(tmp_path))
    model = build_model(config(tmp_path, method=method()))
    second = get_second(model)
    assert first_network(Params.of(model)).sha256() == Params.of(plain).sha256()
    assert {n: t.shape for n, t in second.state_dict().items()} == {
        n: t.shape for n, t in plain.state_dict().items()
    }
    for name, tensor in second.named_parameters():
        first = plain.state_dict()[name]
        assert torch.equal(tensor.flatten().sort().values, first.flatten().sort().values)
        assert first.numel() < 8 or not first.any() or not torch.equal(tensor, first)
    image = torch.rand(1, 1, 16, 16)
    assert torch.equal(model(image), plain(image)) and not torch.equal(second(image), plain(image))


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"dropout": 0.3, "norm": "batch", "bn_stats": "pooled"},
        {"stem": "variational", "variational": {"channels": 2, "prior": "global", "kl_weight": 0.1}},
    ],
    ids=str,
)
def test_with_lam_zero_and_all_masks_the_first_network_is_that_of_fedavg(
    model: dict[str, Any], tmp_path: Path
) -> None:
    changes = {
        "model": {"name": "unet2d", "base_filters": 2, "levels": 2, **model},
        "objective": {"name": "dice"},
    }
    fedmix = run(tmp_path / "fedmix", method=method(lam=0.0), **changes)
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"}, **changes)
    assert first_network(fedmix.outcome.state.params).sha256() == fedavg.params_sha256
    assert fedmix.records[1]["validation"] == fedavg.records[1]["validation"]
    start = Params.of(build_model(fedmix.config))
    moved = [n for n in start if n.startswith(SECOND) and start[n].is_floating_point()]
    assert any(not torch.equal(start[n], fedmix.outcome.state.params[n]) for n in moved)


def test_the_divergence_of_the_second_networks_stem_is_minimised_too(tmp_path: Path) -> None:
    stem = {"stem": "variational", "variational": {"channels": 2, "kl_weight": 0.5}}
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, **stem}
    result = run(tmp_path / "run", method=method(lam=0.0), rounds=1, model=model)
    for loss in result.records[0]["loss"].values():
        assert loss["total"] > loss["first"] + loss["second"] + 1.5 * loss["kl"]


def test_both_networks_travel(tmp_path: Path) -> None:
    fedmix = run(tmp_path / "fedmix", rounds=1, method=method())
    fedavg = run(tmp_path / "fedavg", rounds=1)
    two, one = (r.records[0]["exchanges"][0]["bytes_down"]["north"] for r in (fedmix, fedavg))
    assert two == 2 * one


# Whole runs


def test_recorded_weights_follow_from_recorded_counts_and_losses(tmp_path: Path) -> None:
    """Two rounds, in plain arithmetic."""
    result = run(tmp_path / "run", method=method(annotation={"east": "none"}, agreement=0.0))
    for record in result.records:
        n, loss = record["num_used"], record["first_loss"]
        assert all(loss[c] == record["loss"][c]["first"] for c in loss)
        raw = {
            c: n[c] / sum(n.values()) + 10 * loss[c] ** 1.5 / sum(v**1.5 for v in loss.values()) for c in n
        }
        expected = {c: value / sum(raw.values()) for c, value in raw.items()}
        assert record["weights"] == pytest.approx(expected)


def test_each_network_trains_on_the_others_masks_and_never_on_the_truth(tmp_path: Path) -> None:
    """A model that stands still: the recorded losses are those of F_1 against ŷ_2 and of F_2 against ŷ_1."""
    kinds = {"east": "none", "north": "image", "south": "mask"}
    result = run(tmp_path / "run", rounds=1, method=method(annotation=kinds, agreement=0.0), **STILL)
    model = build_model(result.config).eval()
    federation = open_federation(result.config.data, result.config.seed)
    for name, kind in kinds.items():
        train = federation.load(name).train
        batch = train.batch(range(len(train)))
        with torch.no_grad():
            z_1, z_2 = model(batch.image), get_second(model)(batch.image)
        truth = (batch.label > 0).long()
        y_1, y_2, used = (z_1[:, 0] > 0).long(), (z_2[:, 0] > 0).long(), torch.ones(len(train)).bool()
        if kind == "mask":
            y_1 = y_2 = truth
        if kind == "image":
            has = truth.flatten(1).any(dim=1)
            y_1, y_2 = (y * has[:, None, None] for y in (y_1, y_2))
            used = ~has | (y_1.flatten(1).any(dim=1) & y_2.flatten(1).any(dim=1))
        found = result.records[0]["loss"][name]
        assert result.records[0]["num_used"][name] == int(used.sum()) > 0
        assert found["first"] == pytest.approx(float(dice_loss(z_1[used], y_2[used])), rel=1e-5)
        assert found["second"] == pytest.approx(float(dice_loss(z_2[used], y_1[used])), rel=1e-5)


def test_a_client_without_an_accepted_image_does_not_train_and_has_no_weight(tmp_path: Path) -> None:
    weak = {"east": "none", "north": "box"}
    result = run(tmp_path / "run", method=method(annotation=weak, agreement=1.0, box_dice=1.0))
    for record in result.records:
        assert record["weights"] == {"east": 0.0, "north": 0.0, "south": 1.0}
        assert record["num_used"] == {"east": 0, "north": 0, "south": record["num_used"]["south"]}
        assert set(record["first_loss"]) == {"south"} and record["refused"] == {} == record["lost"]


def test_a_round_in_which_nobody_has_an_accepted_image_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    everyone = dict.fromkeys(("east", "north", "south"), "none")
    result = run(tmp_path / "run", method=method(annotation=everyone, agreement=1.0))
    assert result.params_sha256 == Params.of(build_model(result.config)).sha256()


def test_weak_annotations_work_with_three_classes_in_three_dimensions(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": 4, "dimensions": 3, "num_classes": 3}}
    model = {"name": "unet3d", "base_filters": 2, "levels": 2}
    weak = {"east": "box", "north": "image"}
    changes = method(annotation=weak, agreement=0.0, box_dice=0.0)
    result = run(tmp_path / "run", rounds=1, batch_size=2, data=data, model=model, method=changes)
    assert min(result.records[0]["num_used"].values()) > 0


def test_a_lost_client_and_one_with_an_impossible_loss_are_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="boom"))

    def negative(answer: Answer) -> Answer:
        return replace(answer, message=replace(answer.message, scalars={"num_used": 4, "loss": -1.0}))

    spoil(monkeypatch, "north", negative)
    result = run(tmp_path / "run", method=method())
    assert set(result.records[0]["weights"]) == {"north", "south"}
    assert result.records[0]["weights"]["north"] < 0.1  # no loss part


# Settings


def test_a_misspelt_client_is_refused_before_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method.annotation names 'nort'.*Did you mean 'north'"):
        run(tmp_path / "run", method=method(annotation={"nort": "box"}))


@pytest.mark.parametrize("name", ["cfsl", "simclr"])
def test_an_objective_that_compares_features_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method 'fedmix_supervision'.*'{name}'"):
        config(tmp_path, method=method(), objective={"name": name})


@pytest.mark.parametrize("kind", ["local", "reestimate"])
def test_statistics_of_one_network_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.bn_stats"):
        config(tmp_path, method=method(), model={"norm": "batch", "bn_stats": kind})


@pytest.mark.parametrize(
    ("key", "value"), [("lam", -1), ("beta", -1), ("agreement", 1.1), ("annotation", {"north": "scribble"})]
)
def test_impossible_settings_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method.{key}"):
        config(tmp_path, method=method(**{key: value}))
