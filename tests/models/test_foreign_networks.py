"""Networks by import path: found, checked, padded; and runs of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Stop, Watcher, config, run, settings

import user_nets
import wardround as wr
from wardround.errors import ConfigError, TooFewClients
from wardround.models import ModelSettings, build, head_names
from wardround.models.tap import TappedSegmenter
from wardround.plugins import import_module, is_import_path

SEGRESNET = {
    "name": "monai:SegResNet",
    "arguments": {"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]},
    "divisor": 8,
}
SMALL = {"name": "user_nets:Small", "arguments": {"width": 2}}


def made(name, dimensions=2, in_channels=1, num_outputs=2, **changes):
    torch.manual_seed(0)
    chosen = ModelSettings(name=name, **changes)
    return build(chosen, in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions)


def error_of(name, **changes):
    with pytest.raises(ConfigError) as caught:
        made(name, **changes)
    return str(caught.value)


# Finding them


def test_what_is_an_import_path():
    assert is_import_path("nets:Net") and is_import_path("a.b_c.d:Outer.Net")
    assert not any(
        map(is_import_path, ["unet2d", "nets:", ":Net", "my nets:Net", "nets/net.py:Net", "a..b:C"])
    )


def test_a_module_in_the_current_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "lying_here.py").write_text(
        "from torch import nn\nclass Net(nn.Conv2d):\n"
        "    def __init__(self, in_channels, num_classes):\n        super().__init__(in_channels, num_classes, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert made("lying_here:Net")(torch.zeros(1, 1, 4, 4)).shape == (1, 2, 4, 4)
    assert sys.path[0] != str(tmp_path) and str(tmp_path) in sys.path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:Net", "there is no module 'no_such_module' in "),
        ("user_nets.inner:Net", "there is no module 'user_nets.inner' in "),
        ("user_nets:Smal", "user_nets has no 'Smal'. Did you mean 'Small'?"),
        (
            "user_nets:NotANetwork",
            "which is not a subclass of torch.nn.Module",
        ),
        ("user_nets:function", "which is not a subclass of torch.nn.Module"),
        ("os:system", "not a subclass"),
    ],
)
def test_what_is_no_network_is_refused(name, reason):
    assert reason in error_of(name)


def test_mistakes_in_the_users_file_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_one.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_two.py").write_text("1 / 0\n")
    assert "module broken_one needs 'not_installed_anywhere', which is not installed" in error_of(
        "broken_one:Net"
    )
    assert "broken_two cannot be imported: ZeroDivisionError: division by zero" in error_of("broken_two:Net")
    with pytest.raises(ConfigError):
        import_module("broken_two", "model.name is 'broken_two:Net'")


def test_a_users_file_cannot_end_the_command_without_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "leaving.py").write_text(
        "import sys\nfrom torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        sys.exit('no')\n"
    )
    assert "a_script cannot be imported: SystemExit: 0" in error_of("a_script:Net")
    assert "'leaving:Net' cannot be built with them: no" in error_of("leaving:Net")


LEAVING = """
import sys
from torch import nn
from wardround.models.base import Output, Segmenter

class Net(nn.Conv2d):
    leaves = staticmethod(lambda net: True)
    def __init__(self, in_channels, num_classes):
        super().__init__(in_channels, num_classes, 1)
    def forward(self, x):
        if self.leaves(self):
            sys.exit(3)
        return super().forward(x)

class Training(Net):
    leaves = staticmethod(lambda net: net.training)

class Own(Segmenter):
    def __init__(self, in_channels, num_outputs, dimensions):
        super().__init__(in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions, divisor=1)
        self.layer = nn.Conv2d(in_channels, num_outputs, 1)
    def _output(self, x):
        sys.exit(3)
"""


def test_a_forward_pass_cannot_end_the_command_without_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "leaving_forward.py").write_text(LEAVING)
    said = "model.name is 'leaving_forward:{}', whose forward pass called sys.exit(3). Remove that call."
    assert error_of("leaving_forward:Net") == said.format("Net")
    model = made("leaving_forward:Training")
    assert model.eval()(torch.zeros(1, 1, 4, 4)).shape == (1, 2, 4, 4)
    with pytest.raises(ConfigError) as caught:
        model.train()(torch.zeros(1, 1, 4, 4))
    assert str(caught.value) == said.format("Training")


@pytest.mark.parametrize("name", ["leaving_forward:Training", "leaving_forward:Own"])
def test_a_run_of_a_network_that_leaves_says_which_one_did(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "leaving_forward.py").write_text(LEAVING)
    with pytest.raises(TooFewClients, match=rf"'{name}'.* called sys\.exit\(3\)"):
        run(tmp_path / "run", model={"name": name})


def test_a_package_that_is_missing_is_named():
    script = """
import sys
class Absent:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "einops":
            raise ModuleNotFoundError("No module named 'einops'", name="einops")
sys.meta_path.insert(0, Absent())
from test_foreign_networks import error_of
for name, arguments in (("SwinUNETR", {"feature_size": 12}), ("UNETR", {"img_size": 32})):
    said = error_of(f"monai:{name}", arguments=arguments)
    assert said.startswith(f"model.name is 'monai:{name}', which needs the package 'einops'. Install it."), said
"""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# Arguments and sizes


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"widht": 3}, "model.arguments.widht is not known to 'user_nets:Small'. Did you mean 'width'?"),
        ({"width": "wide"}, "model.arguments.width is 'wide'; it must be a valid integer"),
        ({"num_classes": 3}, "model.arguments.num_classes is 3; leave it out"),
        ({"width": 0}, "'user_nets:Small'"),
    ],
)
def test_arguments_are_held_against_the_signature(arguments, reason):
    assert reason in error_of("user_nets:Small", arguments=arguments)


def test_our_own_settings_are_not_for_a_users_network():
    assert "model.levels is for our own networks" in error_of("user_nets:Small", levels=3)


@pytest.mark.parametrize(("name", "divisor"), [("Small", 4), ("Rgb", 2), ("Flat", 1), ("Reads", 4)])
def test_the_divisor_is_found_by_trial(name, divisor):
    channels = 3 if name == "Rgb" else 1
    model = made(f"user_nets:{name}", in_channels=channels)
    assert model.divisor == divisor
    assert model(torch.randn(1, channels, 13, 7)).shape == (1, 2, 13, 7)


def test_a_divisor_may_be_given():
    model = made("user_nets:Small", divisor=16)
    assert model.padded_size([17, 3]) == [32, 16]
    assert "model.divisor is for networks of MONAI's or your own" in error_of("unet2d", divisor=16)


def test_a_network_of_one_size_asks_for_its_divisor():
    assert "give model.divisor" in error_of("user_nets:Tokens")
    assert made("user_nets:Tokens", divisor=32)(torch.zeros(1, 1, 30, 20)).shape == (1, 2, 30, 20)


def test_the_wrong_shape_or_channels_are_told():
    assert "into (2, 2, 48, 48), not (2, 2, 96, 96)" in error_of("user_nets:Halves")
    assert "cannot take an image of 1 channels in 2D" in error_of("user_nets:Rgb")
    assert "not (2, 3, " in error_of("user_nets:Rgb", in_channels=3, num_outputs=3)


def test_a_segmenter_is_taken_as_it_stands():
    model = made("user_nets:Own")
    assert isinstance(model, user_nets.Own) and not isinstance(model, TappedSegmenter)


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("in_channels", [1, 4])
def test_stem_and_head_stand_around_any_network(dimensions, in_channels):
    model = made("user_nets:Small", dimensions, in_channels, num_outputs=5, stem="variational").eval()
    x = torch.randn(1, in_channels, *(9, 6, 5)[:dimensions])
    assert model.forward_features(x).logits.shape == (1, 5, *x.shape[2:])
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)
    assert head_names(model) == ["backbone.network.out.weight", "backbone.network.out.bias"]


# Configurations and runs


def test_mistakes_are_told_when_the_configuration_is_read(tmp_path):
    for model, reason in [
        ({"name": "user_nets:Smal"}, "has no 'Smal'"),
        ({"name": "user_nets:Small", "arguments": {"widht": 2}}, "Did you mean 'width'"),
        ({"name": "monai:SegResNet", "arguments": {"init_filters": "many"}}, "a valid integer"),
        ({"name": "unet3d"}, "a 3D network, but the data are 2D"),
        ({"name": "sam3d", "arguments": {"size": "huge"}}, "'tiny', 'small' or 'base'"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            config(tmp_path, model=model)


def test_an_old_run_can_be_read_without_the_network(tmp_path):
    config(tmp_path, model={"name": "gone_since:Net"})
    with pytest.raises(ConfigError, match="there is no module 'gone_since'"):
        run(tmp_path / "run", model={"name": "gone_since:Net"})


def test_decoder_features_that_are_missing_are_refused_when_the_configuration_is_read(tmp_path):
    unet = {"name": "monai:UNet", "arguments": {"channels": [2, 4], "strides": [2]}}
    for changes in ({"method": {"name": "fedproto"}}, {"objective": {"name": "local_cl"}}):
        with pytest.raises(ConfigError, match="decoder features of the image's size.*'monai:UNet'"):
            config(tmp_path, model=unet, **changes)
    config(tmp_path, model=unet, method={"name": "safcf"})


@pytest.mark.parametrize("model", [SEGRESNET, SMALL], ids=["SegResNet", "user"])
@pytest.mark.parametrize("method", ["fedavg", "safcf", "fedevi"])
def test_two_rounds_and_a_resume_to_the_same_bytes(method, model, tmp_path):
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 8}}
    chosen = {"model": model, "method": {"name": method}, "data": data}
    whole = run(tmp_path / "whole", **chosen)
    broken = settings(tmp_path / "broken", **chosen)
    with pytest.raises((Stop, KeyboardInterrupt)):
        wr.run(broken, listener=Watcher(crash_in_round=1))
    assert wr.run(broken, resume=True).params_sha256 == whole.params_sha256
    assert not any(path.suffix in (".pt", ".pth", ".pkl") for path in Path(whole.folder).rglob("*"))


@pytest.mark.parametrize("method", ["moon", "fedproto", "fsf3a", "fedrcl"])
def test_methods_that_compare_features_take_them_from_the_tap(method, tmp_path):
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 6}}
    result = run(tmp_path / "run", model=SMALL, method={"name": method}, data=data)
    assert len(result.records) == 2 and not result.summary.get("num_lost")


@pytest.mark.parametrize("objective", ["infonce", "local_cl", "evidential"])
def test_objectives_that_compare_features_take_them_from_the_tap(objective, tmp_path):
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 6}}
    model = {**SMALL, "stem": "variational"}
    result = run(tmp_path / "run", model=model, objective={"name": objective}, data=data, rounds=1)
    assert len(result.records) == 1


def test_the_command_line_finds_networks_that_lie_where_it_is_started(tmp_path):
    (tmp_path / "nets_of_mine.py").write_text(Path(user_nets.__file__).read_text())
    shown = subprocess.run(
        [sys.executable, "-m", "wardround", "models", "show", "nets_of_mine:Small", "--size", "20,20"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0 and "nets_of_mine:Small" in shown.stdout, shown.stderr
