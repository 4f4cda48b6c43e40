"""calibration.json of whole runs: what it says, what leaves clients, and that nothing else changes."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Watcher, run, settings, spoil
from scipy.stats import spearmanr

import wardround as wr
from wardround.clients.gate import content_complaint
from wardround.data.cases import TensorSplit
from wardround.data.opening import open_federation
from wardround.engine import host
from wardround.engine.judging import calibration
from wardround.engine.judging.calibration import Repeated
from wardround.messages import Message
from wardround.methods import build_objective
from wardround.uncertainty.calibration import around
from wardround.uncertainty.maps import Accumulator, case_uncertainty


def calibration_of(result):
    return json.loads((result.folder / "calibration.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return run(tmp_path_factory.mktemp("tiny") / "run", rounds=3, local_epochs=2)


def predictions(result, split):
    """By hand: (client, predicted with temperature 1, truth, logits) of every case of a split."""
    federation = open_federation(result.config.data, result.config.seed)
    objective = build_objective(result.config)
    for name in federation.names:
        cases = getattr(federation.load(name), split)
        for number in range(len(cases)):
            batch = cases.batch([number])
            with torch.no_grad():
                logits = result.model(batch.image)[0]
            scan = Accumulator(objective)
            scan.add(logits)
            yield name, scan.result(), batch.label[0], logits


def test_calibration_error_is_that_of_all_test_voxels_together(tiny):
    confidence, right = [], []
    for _, predicted, truth, _ in predictions(tiny, "test"):
        box = around(truth, predicted.label)
        confidence.append(predicted.probabilities.max(dim=0).values[box].flatten().double())
        right.append((predicted.label == truth)[box].flatten())
    confidence, right = torch.cat(confidence).numpy(), torch.cat(right).numpy()
    expected = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    found = calibration_of(tiny)["overall"]["before"]

    assert found["voxels"] == len(confidence)
    assert found["ece"] == pytest.approx(expected, abs=1e-4)


def test_the_temperature_is_the_minimum_over_all_validation_voxels_of_all_clients(tiny):
    logits, truths = [], []
    for _, predicted, truth, z in predictions(tiny, "val"):
        box = around(truth, predicted.label)
        logits.append(z[0][box].flatten().double())
        truths.append(truth[box].flatten().double())
    z, y = torch.cat(logits), torch.cat(truths)
    fitted = calibration_of(tiny)
    beta = torch.tensor(1 / fitted["temperature"], dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(beta * z, y, reduction="sum")
    (slope,) = torch.autograd.grad(loss, beta, create_graph=True)
    (bend,) = torch.autograd.grad(slope, beta)

    assert fitted["temperature_note"] is None
    assert abs(slope / bend).item() < 1e-6 * beta.item()


def test_cases_have_the_dice_of_the_case_table_and_their_correlation_is_scipys(tiny):
    found = calibration_of(tiny)
    rows = [line.split(",") for line in (tiny.folder / "cases.csv").read_text().splitlines()]
    place = rows[0].index("dice")
    table = {(row[0], row[1]): float(row[place]) for row in rows[1:]}
    listed = {(row["client"], row["case"]): row["dice"] for row in found["cases"]}

    assert listed.keys() == table.keys()
    assert all(listed[key] == pytest.approx(table[key], abs=1e-4) for key in table)
    unsure = [row["uncertainty"] for row in found["cases"]]
    expected = spearmanr(unsure, [row["dice"] for row in found["cases"]]).statistic
    if math.isfinite(expected):
        assert found["overall"]["spearman"] == pytest.approx(expected)


def test_quantiles_are_those_of_the_validation_cases_to_the_width_of_a_bin(tiny):
    found = calibration_of(tiny)
    exact = [case_uncertainty(predicted) for _, predicted, _, _ in predictions(tiny, "val")]
    kept = found["quantiles"]["entropy"]["case"]

    assert kept["count"] == len(exact) == sum(found["validation_cases"].values())
    assert kept["min"] <= kept["q05"] <= kept["q50"] <= kept["q99"] <= kept["max"]


def test_only_sums_and_test_rows_leave_a_client(tmp_path, monkeypatch):
    sent = []
    spoil(monkeypatch, "north", lambda answer: sent.append(answer.message) or answer, "calibrate")
    run(tmp_path / "run")
    sums, quality = sent

    assert not sums.tensors() and not quality.tensors()
    assert set(sums.scalars) == {"first", "second", "third", "cases", "voxels", "left_out"}
    assert set(quality.scalars) == {"validation", "before", "after", "errors", "cases"}
    assert set(quality.scalars["cases"][0]) == {"case", "dice", "uncertainty", "epistemic", "overlap"}
    for message in sent:
        assert content_complaint(message) is None
        assert len(json.dumps(message.scalars)) < 20_000
    lines = [json.loads(line) for line in (tmp_path / "run" / "egress.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["task"] == "calibrate"]
    assert len(mine) == 6 and all(not line["tensors"] and line["phase"] == "test" for line in mine)


def test_a_run_without_it_has_the_same_other_files(tiny, tmp_path):
    plain = run(
        tmp_path / "run",
        rounds=3,
        local_epochs=2,
        evaluate={"metrics": ["dice"], "overlays": 0, "calibrate": False},
    )

    assert not (plain.folder / "calibration.json").exists()
    assert plain.params_sha256 == tiny.params_sha256
    assert (plain.folder / "cases.csv").read_bytes() == (tiny.folder / "cases.csv").read_bytes()


@pytest.mark.slow
def test_workers_and_a_resumed_run_write_the_same_bytes(tiny, tmp_path):
    workers = run(tmp_path / "workers", rounds=3, local_epochs=2, compute={"threads": 1, "workers": 2})
    again = settings(tmp_path / "again", rounds=3, local_epochs=2)
    with pytest.raises(KeyboardInterrupt):
        wr.run(again, listener=Watcher(crash_in_round=3))
    resumed = wr.run(again, resume=True)

    expected = (tiny.folder / "calibration.json").read_bytes()
    assert (workers.folder / "calibration.json").read_bytes() == expected
    assert (resumed.folder / "calibration.json").read_bytes() == expected


@pytest.mark.parametrize(
    "model, method, kinds",
    [
        ({"dropout": 0.3}, "fedavg", {"entropy", "dropout"}),
        ({"stem": "variational"}, "fedavg", {"entropy", "samples"}),
        ({}, "fedevi", {"evidential"}),
    ],
    ids=["dropout", "variational", "evidential"],
)
def test_every_kind_a_model_offers_has_its_quantiles(tmp_path, model, method, kinds):
    result = run(
        tmp_path / "run",
        rounds=1,
        model={"name": "unet2d", "base_filters": 2, "levels": 2, **model},
        method={"name": method},
        evaluate={"metrics": ["dice"], "overlays": 0, "passes": 3},
    )
    found = calibration_of(result)["quantiles"]

    assert set(found) == kinds
    for kind in kinds - {"entropy"}:
        assert set(found[kind]) == {"case", "epistemic"}
        assert found[kind]["epistemic"]["count"] == found[kind]["case"]["count"] > 0


def test_each_repeated_case_is_a_pass_of_its_own():
    split = TensorSplit(
        ["a", "b"], torch.arange(2.0)[:, None, None, None], torch.zeros(2, 1, 1), [(1.0, 1.0)] * 2
    )
    repeated = Repeated(split, 3)

    assert len(repeated) == 6 and not repeated.one_shape
    assert [repeated.batch([place]).image.item() for place in range(6)] == [0, 0, 0, 1, 1, 1]


# Edges


def edited(monkeypatch, change):
    """Let every client's cases pass through `change(name, data)`."""
    loaded = host.Host.client

    def client(self, name):
        found = loaded(self, name)
        found.data = change(name, found.data)
        return found

    monkeypatch.setattr(host.Host, "client", client)


def without(split):
    return TensorSplit([], split.images[:0], split.labels[:0], [])


def test_clients_with_no_validation_cases_are_tested_with_the_others_temperature(tmp_path, monkeypatch):
    edited(monkeypatch, lambda name, data: replace(data, val=without(data.val)) if name == "north" else data)
    found = calibration_of(run(tmp_path / "run"))

    assert found["validation_cases"]["north"] == 0 < found["validation_cases"]["south"]
    assert found["clients"]["north"]["before"]["voxels"] > 0


def test_no_validation_case_anywhere_leaves_one_and_no_quantiles(tmp_path, monkeypatch):
    edited(monkeypatch, lambda name, data: replace(data, val=without(data.val)))
    found = calibration_of(run(tmp_path / "run"))

    assert found["temperature"] == 1 and "no client has a validation case" in found["temperature_note"]
    assert "every class annotated" in found["temperature_note"]  # others cannot serve
    assert found["quantiles"] == {}
    assert found["overall"]["before"] == found["overall"]["after"]


def test_no_test_case_anywhere_says_nothing_of_errors(tmp_path, monkeypatch):
    edited(monkeypatch, lambda name, data: replace(data, test=without(data.test)))
    found = calibration_of(run(tmp_path / "run"))

    assert found["overall"]["num_cases"] == 0 and found["overall"]["before"]["ece"] is None
    assert found["cases"] == found["risk_coverage"]["cases"] == found["reliability"]["before"] == []


def test_one_client_alone(tmp_path):
    found = calibration_of(run(tmp_path / "run", data={"phantom": {"hospitals": 1, "size": 16, "cases": 8}}))

    (name,) = found["clients"]
    for key in ("before", "after", "aurc", "spearman"):
        assert found["clients"][name][key] == found["overall"][key]


def test_empty_masks_everywhere(tmp_path, monkeypatch):
    def emptied(name, data):
        def of(split):
            return TensorSplit(split.names, split.images, torch.zeros_like(split.labels), split._spacings)

        return replace(data, val=of(data.val), test=of(data.test))

    edited(monkeypatch, emptied)
    found = calibration_of(run(tmp_path / "run"))

    assert found["overall"]["num_cases"] > 0
    assert content_complaint(Message(scalars=found)) is None


def test_a_model_that_gives_nan_is_counted_and_the_file_is_still_written(tmp_path, monkeypatch):
    honest = calibration.iterate_cases

    def broken(client, split, params):
        for place, logits, batch in honest(client, split, params):
            yield place, logits if place else torch.full_like(logits, math.nan), batch

    monkeypatch.setattr(calibration, "iterate_cases", broken)
    found = calibration_of(run(tmp_path / "run"))

    assert found["overall"]["num_left_out"] == 3
    assert np.isfinite(found["overall"]["before"]["ece"])
    assert [row["uncertainty"] for row in found["cases"]].count(None) == 3


def test_a_client_that_fails_is_named(tmp_path, monkeypatch):
    spoil(monkeypatch, "north", lambda answer: replace(answer, failure="out of disk"), "calibrate")
    found = calibration_of(run(tmp_path / "run"))

    assert found["missing"] == ["north"] and "north" not in found["clients"]
    assert found["clients"].keys() == {"east", "south"}
