"""Start weights: what matches, what does not and why, and runs that begin from a file."""

import json
import logging

import pytest
import torch
from helpers import Watcher, run, settings
from safetensors.torch import save_file

import wardround as wr
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.models import ModelSettings, build
from wardround.models.start_weights import compare, load_into
from wardround.params import Params

TINY = {"name": "unet2d", "base_filters": 2, "levels": 2}


def unet(seed=0, num_outputs=1, **changes):
    torch.manual_seed(seed)
    chosen = ModelSettings(**{**TINY, **changes})
    return build(chosen, in_channels=1, num_outputs=num_outputs, dimensions=2)


def saved(tmp_path, tensors, prefix="", name="start.safetensors"):
    path = tmp_path / name
    save_file({prefix + key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return path


def test_a_file_of_the_same_network_is_taken_whole(tmp_path):
    source, model = unet(1), unet(2)
    match = load_into(model, saved(tmp_path, source.state_dict()))
    assert not match.left and not match.unused and match.share == 1
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), model.parameters(), strict=True))


def test_shapes_that_differ_and_names_that_lack_keep_their_random_start(tmp_path):
    source, model = unet(1, num_outputs=3), unet(2)
    tensors = source.state_dict()
    del tensors["encoder.0.first.conv.weight"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    match = load_into(model, saved(tmp_path, {**tensors, "further": torch.zeros(1)}))
    assert match.left == {
        "encoder.0.first.conv.weight": "not in the file",
        "head.weight": "1x2x1x1 here, 3x2x1x1 in the file",
        "head.bias": "1 here, 3 in the file",
    }
    assert match.unused == ["further", "head.bias", "head.weight"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name in match.left else tensors[name])


@pytest.mark.parametrize("prefix", ["module.", "network.", "state_dict.model.", ""])
def test_prefixes_on_either_side_are_seen_through(prefix, tmp_path):
    path = saved(tmp_path, unet(1).state_dict(), prefix)
    assert compare(unet(2), path).file_prefix == prefix and not compare(unet(2), path).left
    match = compare(unet(2, stem="variational", variational={"channels": 1}), path)
    assert match.model_prefix == "backbone." and set(match.left) == {"stem.mu", "stem.rho", "stem.bias"}


def test_an_encoder_alone_finds_its_place(tmp_path):
    encoder = {
        name.removeprefix("encoder."): t for name, t in unet(1).state_dict().items() if "encoder" in name
    }
    match = compare(unet(2), saved(tmp_path, encoder, "trained."))
    assert (match.file_prefix, match.model_prefix) == ("trained.", "encoder.") and not match.unused


def test_one_layer_is_not_mistaken_for_another(tmp_path):
    model = unet(2, levels=3)
    tensors = {f"decoder.0.{rest}": torch.zeros(3) for rest in ("up.weight", "up.bias")}
    tensors |= {f"other.{number}": torch.zeros(1) for number in range(5)}
    tensors["decoder.0.up.bias"] = torch.zeros_like(model.state_dict()["decoder.1.up.bias"])
    with pytest.raises(ConfigError, match="nothing fits"):
        compare(model, saved(tmp_path, tensors))


def test_halves_become_floats(tmp_path):
    source, model = unet(1), unet(2)
    load_into(model, saved(tmp_path, {name: t.half() for name, t in source.state_dict().items()}))
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, source.head.weight.half().float())


def test_files_that_cannot_be_used_are_refused(tmp_path):
    pickled = tmp_path / "model.pt"
    pickled.write_bytes(b"\x80\x04pickled")
    for path, reason in [
        (tmp_path / "nowhere.safetensors", "does not exist"),
        (tmp_path, "is a folder"),
        (pickled, "not a safetensors file .* Pickled files can run code"),
        (saved(tmp_path, {"a": torch.zeros(2)}), r"nothing fits: .*'encoder.*the file 'a' \(2\)"),
        (saved(tmp_path, {}, name="empty.safetensors"), "nothing fits.*the file none"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            compare(unet(), path)


# Runs


def test_a_run_begins_from_the_file_and_tells_what_matched(tmp_path, caplog):
    path = saved(tmp_path, unet(1, num_outputs=3).state_dict(), "network.")
    model = {**TINY, "weights": str(path)}
    with caplog.at_level(logging.WARNING):
        result = run(tmp_path / "run", model=model, rounds=1, optimizer={"name": "sgd", "learning_rate": 0.0})
    assert "start weights: 8 of 10 tensors" in caplog.text and "head.weight" in caplog.text
    facts = json.loads((result.folder / "start_weights.json").read_text())
    assert set(facts["left"]) == {"head.weight", "head.bias"} and facts["file_prefix"] == "network."
    kept = unet(1, num_outputs=3).state_dict()["encoder.0.first.conv.weight"]
    assert torch.equal(result.outcome.state.params["encoder.0.first.conv.weight"], kept)


def test_workers_agree_and_a_resumed_run_does_not_need_the_file(tmp_path):
    path = saved(tmp_path, unet(1).state_dict())
    changes = {
        "model": {**TINY, "weights": str(path)},
        "data": {"phantom": {"hospitals": 2, "size": 16, "cases": 6}},
    }
    whole = run(tmp_path / "whole", **changes)
    broken = settings(tmp_path / "broken", **changes)
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=1))
    path.unlink()
    resumed = wr.run(broken, resume=True)
    assert resumed.params_sha256 == whole.params_sha256
    assert Params.of(build_model(resumed.config)).sha256() != whole.params_sha256  # the file is not needed
    assert wr.Result.load(tmp_path / "whole").params.sha256() == whole.params_sha256
    with pytest.raises(ConfigError, match="does not exist"):
        run(tmp_path / "new", **changes)


def test_a_fresh_run_without_the_file_is_refused_even_over_an_old_one(tmp_path):
    path = saved(tmp_path, unet(1).state_dict())
    changes = {"model": {**TINY, "weights": str(path)}, "rounds": 1}
    run(tmp_path / "run", **changes)
    path.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        wr.run(settings(tmp_path / "run", **changes), overwrite=True)
