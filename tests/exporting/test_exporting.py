"""Exports: whole folders or none, a card with the numbers of the run, one sentence for a mistake."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import run, spoil
from safetensors.torch import load_file
from scipy import stats

from wardround.cli import app
from wardround.comparison.runs import read_run
from wardround.comparison.statistics import bootstrap
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.errors import CheckpointError, ConfigError
from wardround.exporting import export, exports
from wardround.exporting.exports import graph_readme
from wardround.exporting.package import Package, opened
from wardround.prediction.predicting import Predictor
from wardround.prediction.trained import TrainedModel
from wardround.tables import Interval, shown

# The plain folder


@pytest.mark.slow
def test_the_loader_gives_the_network_in_another_process(
    volumes: Path, tmp_path: Path, in_process: Any
) -> None:
    export(volumes, "torch", tmp_path / "out")
    script = (
        "import torch, numpy; from loader import load; torch.manual_seed(3);"
        "x = torch.randn(1, 1, 9, 10, 11); numpy.save('y.npy', load()(x).numpy())"
    )

    done = in_process("-c", script, cwd=tmp_path / "out")

    assert done.returncode == 0, done.stderr
    network = TrainedModel.load(volumes, device="cpu").model
    torch.manual_seed(3)
    expected = network(torch.randn(1, 1, 9, 10, 11))
    assert np.array_equal(np.load(tmp_path / "out" / "y.npy"), expected.numpy())
    assert in_process("loader.py", cwd=tmp_path / "out").stdout.startswith("UNet, ")


def test_the_readmes_code_gives_the_probabilities_of_predict(
    pictures: Path, tmp_path: Path, in_process: Any
) -> None:
    shutil.copytree(pictures, tmp_path / "run")
    (tmp_path / "run" / "calibration.json").write_text(json.dumps({"temperature": 3.0, "quantiles": {}}))
    export(tmp_path / "run", "torch", tmp_path / "out")
    code = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[0]
    script = code.replace("torch.zeros(1, 1, 64, 64)", "torch.ones(1, 1, 16, 16)")
    assert script != code

    done = in_process("-c", script + "import numpy; numpy.save('p.npy', p.numpy())", cwd=tmp_path / "out")

    assert done.returncode == 0, done.stderr
    found = Predictor([TrainedModel.load(tmp_path / "run", device="cpu")]).infer(torch.ones(1, 16, 16))
    np.testing.assert_allclose(np.load(tmp_path / "out" / "p.npy")[0], found.probabilities, atol=1e-6)


def test_training_heads_are_left_out_and_the_network_is_the_same(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "moon", "head": "mlp"}, rounds=1)
    export(tmp_path / "run", "torch", tmp_path / "out")
    whole, part = result.model.state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    image = torch.randn(2, 1, 16, 16)

    assert set(part) < set(whole)
    back = opened(tmp_path / "out" / "model.json", tmp_path / "out" / "model.safetensors")
    assert torch.equal(back.model(image), result.model(image))


def test_layers_that_a_method_puts_in_front_come_along(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "harmofl", "window": 1}, rounds=1)
    export(tmp_path / "run", "torch", tmp_path / "out")
    image = torch.randn(1, 1, 16, 16) + 3

    back = opened(tmp_path / "out" / "model.json", tmp_path / "out" / "model.safetensors")
    assert torch.equal(back.model(image), result.model(image))


def test_a_personal_model_is_exported_by_its_clients_name(tmp_path: Path) -> None:
    run(tmp_path / "run", method={"name": "fedbn"}, model={"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"})  # fmt: skip
    name = next(iter(read_run(tmp_path / "run").clients))
    export(tmp_path / "run", "torch", tmp_path / "out", client=name)
    image = torch.randn(1, 1, 16, 16)

    back = opened(tmp_path / "out" / "model.json", tmp_path / "out" / "model.safetensors")
    own = TrainedModel.load(tmp_path / "run", client=name, device="cpu")
    assert torch.equal(back.model(image), own.model(image))
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert f"It is the personal model of {name}." in card
    assert f"only the row of {name} is about this one" in card


UNETR = {"img_size": 32, "feature_size": 4, "hidden_size": 24, "mlp_dim": 32, "num_heads": 2}
SWIN = {"feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 4}


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(("name", "arguments"), [("monai:UNETR", UNETR), ("monai:SwinUNETR", SWIN)])
def test_transformers_of_monai_come_back_the_same(
    name: str, arguments: dict[str, Any], dimensions: int, tmp_path: Path, in_process: Any
) -> None:
    pytest.importorskip("einops")
    result = run(
        tmp_path / "run",
        rounds=1,
        batch_size=2,
        data={"phantom": {"hospitals": 2, "dimensions": dimensions, "size": 24, "cases": 6}},
        model={"name": name, "arguments": arguments},
    )
    image = torch.randn(1, 1, *(20, 32, 27)[:dimensions])
    expected = result.model(image).detach()
    for kind, model, weights in (
        ("torch", "model.json", "model.safetensors"),
        ("bundle", "configs/model.json", "models/model.safetensors"),
    ):
        export(tmp_path / "run", kind, tmp_path / kind)
        back = opened(tmp_path / kind / model, tmp_path / kind / weights)
        assert torch.equal(back.model(image), expected)
    np.save(tmp_path / "torch" / "image.npy", image.numpy())
    script = (
        "import numpy, torch; from loader import load;"
        "numpy.save('y.npy', load()(torch.from_numpy(numpy.load('image.npy'))).numpy())"
    )

    done = in_process("-c", script, cwd=tmp_path / "torch")

    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "torch" / "y.npy"), expected.numpy(), atol=1e-4)


# The card


def test_the_card_names_whose_updates_had_no_noise(volumes: Path, tmp_path: Path) -> None:
    shutil.copytree(volumes, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    told = {"level": "client", "epsilon": 4.0, "delta": 1e-5, "scores": "withhold", "counts": "declared"}
    first, *others = sorted(read_run(volumes).clients)
    lines[-1]["privacy"] = {first: told}
    (tmp_path / "run" / "records.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    export(tmp_path / "run", "torch", tmp_path / "out")

    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "epsilon 4.00 at delta 1e-05" in card and f"Without privacy: {', '.join(others)}." in card


def test_the_card_holds_the_numbers_of_the_run(volumes: Path, tmp_path: Path) -> None:
    export(volumes, "torch", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    result = json.loads((volumes / "result.json").read_text())
    facts, dice = read_run(volumes), result["test"]["dice"]

    for client, summary in dice["clients"].items():
        means: dict[str, list[float]] = {}
        for key, value in facts.cases["dice"].items():
            if key.client == client:
                means.setdefault(key.case, []).append(value)
        own = [np.mean(values) for values in means.values()]  # of a case, over its structures
        low, high = stats.t.interval(0.95, len(own) - 1, np.mean(own), stats.sem(own))
        interval = Interval(max(0.0, low), min(1.0, high))  # that of the run's own table
        assert f"| {client} | all | {shown(summary['mean'])} | {shown(interval)} | {len(own)} |" in card
        for structure in ("rim", "core"):
            cases = facts.cases["dice"].items()
            alone = [v for k, v in cases if k.client == client and k.region == structure]
            assert f"| {client} | {structure} | {shown(float(np.mean(alone)))} |" in card
    overall = shown(bootstrap(facts.cases["dice"]))
    assert f"| mean over sites | all | {shown(dice['mean'])} | {overall} |" in card
    assert f"| worst site: {dice['worst'][0]} | all | {shown(dice['worst'][1])} |" in card
    assert result["params_sha256"] in card
    worst = min(value for value in facts.cases["dice"].values())
    assert f"| {shown(worst)} |" in card
    for client, count in facts.num_trained.items():
        assert re.search(rf"\| {client} \| {count} \| \d+ \| \d+ \|", card)
    assert "not a medical device" in card and "**TODO** Licence of the training data" in card
    assert "Chen et al., MICCAI 2024" in card and "Çiçek et al., MICCAI 2016" in card
    assert f"- exported parameters: {Package.of(volumes).params.sha256()}\n" in card


def test_the_card_names_no_case_and_no_folder(volumes: Path, tmp_path: Path) -> None:
    export(volumes, "torch", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    cases = {key.case for key in read_run(volumes).cases["dice"]}

    assert cases and not any(case in card for case in cases)
    assert str(volumes.parent) not in card


def test_the_card_tells_of_calibration_refused_replies_and_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    def broken(answer: Any) -> Any:
        bad = answer.message.params.map(lambda t: t * float("nan") if t.is_floating_point() else t)
        return replace(answer, message=replace(answer.message, params=bad))

    spoil(monkeypatch, "north", broken)
    run(tmp_path / "run")
    calibration = {
        "temperature": 1.25,
        "quantiles": {},
        "overall": {"before": {"ece": 0.111}, "after": {"ece": 0.055}},
        "clients": {"north": {"before": {"ece": 0.2}, "after": {"ece": 0.1}}},
    }
    (tmp_path / "run" / "calibration.json").write_text(json.dumps(calibration))
    export(tmp_path / "run", "torch", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()

    assert "Temperature 1.25" in card
    assert "| ECE | 0.111 | 0.055 |" in card and "| north | 0.200 | 0.100 |" in card
    assert "Replies refused by the server's checks: 2 (north 2)." in card


def test_the_card_has_rows_of_every_structure_and_the_intervals_of_the_runs_table(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data={"phantom": {"hospitals": 2, "size": 16, "cases": 12}})
    cases = (tmp_path / "run" / "cases.csv").read_text().splitlines()
    twice = [line.replace(",lesion,", f",{name},") for line in cases[1:] for name in ("core", "rim")]
    (tmp_path / "run" / "cases.csv").write_text("\n".join([cases[0], *twice]) + "\n")
    export(tmp_path / "run", "torch", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    north = next(row for row in result.table.rows if row[0] == "north")
    known = f"{shown(north[1])} | {shown(north[2])} | {north[3]}"

    assert "| site | structure | mean | 95 % interval | cases | infinite values |" in card
    for structure in ("all", "core", "rim"):
        assert f"| north | {structure} | {known} | 0 |" in card


def test_the_card_keeps_a_held_out_site_out_of_the_mean(tmp_path: Path) -> None:
    result = run(tmp_path / "run", participation=["north", "east"])
    export(tmp_path / "run", "torch", tmp_path / "out")
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    dice = result.summary["test"]["dice"]
    trained = {k: v for k, v in read_run(tmp_path / "run").cases["dice"].items() if k.client != "south"}

    assert f"| mean over sites | {shown(dice['mean'])} | {shown(bootstrap(trained))} |" in card
    assert f"| south (held out) | {shown(dice['clients']['south']['mean'])} |" in card
    assert "Held-out sites took no part in training" in card


@pytest.mark.parametrize("kind", ["torch", "bundle"])
def test_anonymous_exports_name_no_site(pictures: Path, tmp_path: Path, kind: str) -> None:
    export(pictures, kind, tmp_path / "out", anonymous=True)
    names = read_run(pictures).clients
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*.*") if path.suffix in (".md", ".json")]

    assert names and not any(re.search(rf"\b{name}\b", text) for name in names for text in texts)
    assert "| site 1 |" in (tmp_path / "out" / "MODEL_CARD.md").read_text()


def test_2d_images_stay_as_stored(tmp_path: Path) -> None:
    """prepare.orientation turns volumes alone, so an export of pictures must not ask for it."""
    made = PhantomSettings(hospitals=2, dimensions=2, size=16, cases=6)
    phantom_files.write(made, tmp_path / "data", "nifti", seed=1)
    federation = {"sources": [{"path": "data"}], "labels": {"lesion": [1]}, "prepare": {"orientation": "RAS"}}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(federation))
    run(tmp_path / "run", data={"federation": str(tmp_path / "federation.yaml")}, rounds=1)
    assert TrainedModel.load(tmp_path / "run", device="cpu").preparation.prepare["orientation"] == "RAS"
    for kind, model in (("torch", "model.json"), ("bundle", "configs/model.json")):
        out = tmp_path / kind
        export(tmp_path / "run", kind, out)
        texts = [path.read_text() for path in out.rglob("*.*") if path.suffix in (".md", ".json")]
        assert not any(re.search(r"\bRAS\b", text) for text in texts)
        assert json.loads((out / model).read_text())["preparation"]["prepare"]["orientation"] is None
        assert "- preparation, orientation: as stored\n" in (out / "MODEL_CARD.md").read_text()
    for readme in (
        (tmp_path / "torch" / "README.md").read_text(),
        graph_readme(Package.of(tmp_path / "run"), []),
    ):
        assert "Axes stay as stored in the file" in readme


def test_volumes_keep_their_orientation(volumes: Path, tmp_path: Path) -> None:
    export(volumes, "torch", tmp_path / "out")
    assert "- preparation, orientation: RAS\n" in (tmp_path / "out" / "MODEL_CARD.md").read_text()
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["preparation"]["prepare"]["orientation"] == "RAS"
    assert "Axes stay" not in (tmp_path / "out" / "README.md").read_text()


# Places


def test_an_existing_folder_is_replaced_only_when_asked_and_only_if_it_is_an_export(
    pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(pictures, "torch", out)
    (out / "old").write_text("")

    with pytest.raises(ConfigError, match="exists. Add --overwrite"):
        export(pictures, "torch", out)
    export(pictures, "torch", out, overwrite=True)
    assert not (out / "old").exists()
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "holiday.jpg").write_text("")
    with pytest.raises(ConfigError, match="is not an export of wardround"):
        export(pictures, "torch", photos, overwrite=True)
    assert (photos / "holiday.jpg").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_a_failure_leaves_the_old_export_and_nothing_half(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(pictures, "torch", out)
    before = (out / "model.json").read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(exports, "write_card", fails)
    with pytest.raises(OSError, match="disk is full"):
        export(pictures, "torch", out, overwrite=True)
    assert (out / "model.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to": "tflite"}, "--to is 'tflite'; choose from onnx, bundle, torch"),
        ({"out": "model.onnx"}, "looks like a file; give a folder"),
        ({"run": "nowhere"}, "does not exist; give the folder of a run"),
        ({"client": "nort"}, "has no personal model|has nothing of a client 'nort'"),
    ],
)
def test_a_mistake_is_one_sentence(
    pictures: Path, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    given = {"to": "torch", "out": "out", "run": str(pictures), **change}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        export(
            given["run"] if given["run"] == str(pictures) else tmp_path / given["run"],
            given["to"],
            tmp_path / given["out"],
            client=given.get("client"),
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_is_refused(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()

    with pytest.raises(CheckpointError, match="is not finished.*--resume"):
        export(tmp_path / "run", "torch", tmp_path / "out")


def test_the_run_itself_is_never_replaced(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "runs" / "run")

    for out in (tmp_path / "runs" / "run", tmp_path / "runs"):
        with pytest.raises(ConfigError, match="contains the run itself"):
            export(tmp_path / "runs" / "run", "torch", out, overwrite=True)


def test_the_command_line_prints_json_alone(pictures: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    done = CliRunner().invoke(
        app, ["export", str(pictures), "--to", "torch", "-o", str(tmp_path / "out"), "--json"]
    )

    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)["files"]) == {
        "MODEL_CARD.md", "README.md", "loader.py", "model.json", "model.safetensors",
    }  # fmt: skip
