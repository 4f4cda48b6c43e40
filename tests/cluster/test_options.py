"""Where cells run: what was asked for is checked before anything starts."""

import sys
from typing import Any

from pytest import MonkeyPatch, mark, raises

from wardround.cluster.options import check_options, open_cluster, parse_options
from wardround.errors import ConfigError


def test_this_machine_is_no_cluster() -> None:
    assert open_cluster("local", {}) is None and parse_options("") == {}


def test_options_of_sbatch_go_by_their_long_names() -> None:
    told = parse_options("partition=gpu, gpus_per_node=1,exclude=n1,n2,time=2-12:00:00,gres=gpu:a100:1")

    assert check_options("slurm", told) == {
        "partition": "gpu", "gpus-per-node": "1", "exclude": "n1,n2", "time": "2-12:00:00",
        "gres": "gpu:a100:1",
    }  # fmt: skip
    assert check_options("ray", {"num_gpus": 0.5, "num_cpus": 2}) == {"num_gpus": 0.5, "num_cpus": 2.0}


@mark.parametrize(
    ("on", "options", "sentence"),
    [
        ("slrm", {}, "--on is 'slrm'. Did you mean 'slurm'? It is one of local, slurm, ray."),
        ("local", {"time": "60"}, "--on-options are for --on slurm and --on ray"),
        ("slurm", {"partitoin": "gpu"}, "--on slurm has no option 'partitoin'. Did you mean 'partition'?"),
        ("slurm", {"executor": "pbs"}, "executor is 'pbs'; it is slurm or local."),
        ("slurm", {"comment": "a\n#SBATCH --x"}, "give a word or a number"),
        ("ray", {"partition": "gpu"}, "There are: address, num_cpus, num_gpus."),
        ("ray", {"num_cpus": "1.5"}, "num_cpus is '1.5'; give a whole number, or a part of one."),
        ("ray", {"address": "local"}, "for this machine alone, leave out --on ray"),
    ],
)
def test_mistakes_are_one_sentence(on: str, options: dict[str, Any], sentence: str) -> None:
    with raises(ConfigError) as caught:
        open_cluster(on, options)

    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@mark.parametrize("text", ["gpu", "time=", "gpu,time=60"])
def test_an_option_without_a_value_is_refused(text: str) -> None:
    with raises(ConfigError, match="give name=value"):
        parse_options(text)


@mark.parametrize(("on", "library"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_extra_that_is_not_installed_is_named(on: str, library: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)

    with raises(ConfigError, match=rf"--on {on} needs {library}, .*pip install 'wardround\[{on}\]'"):
        open_cluster(on, {})
