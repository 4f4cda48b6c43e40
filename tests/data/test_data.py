"""The server's own cases: a centre that is no client."""

from pathlib import Path
from typing import Any

from helpers import config, run
from pytest import raises

from wardround.data.opening import open_federation
from wardround.data.roles import PROXY
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError


def data(**changes: Any) -> DataSettings:
    return DataSettings.model_validate({"phantom": {"hospitals": 3, "size": 16, "cases": 8}, **changes})


def test_the_proxy_is_no_client_and_has_training_and_validation_cases_but_no_test_cases() -> None:
    everyone, without = open_federation(data(), 1), open_federation(data(proxy="south"), 1)

    assert set(everyone.names) - set(without.names) == {"south"}
    home, proxy = everyone.load("south"), without.load(PROXY)
    assert proxy.train.names == [*home.train.names, *home.val.names]
    assert len(proxy.val) == len(proxy.test) == 0


def test_an_unknown_or_only_centre_is_refused_as_proxy() -> None:
    with raises(ConfigError, match="data.proxy is 'sout', which is not a centre. Did you mean 'south'"):
        open_federation(data(proxy="sout"), 1)
    with raises(ConfigError, match="no client is left"):
        open_federation(data(phantom={"hospitals": 1}, proxy="north"), 1)


def test_a_method_that_needs_no_proxy_never_loads_it(tmp_path: Path) -> None:
    settings = config(tmp_path, data=data(proxy="south").model_dump()).data.model_dump()
    result = run(tmp_path / "run", data=settings)

    assert set(result.summary["test"]["dice"]["clients"]) == {"north", "east"}
    assert not (tmp_path / "run/clients/proxy").exists()
