"""What holds where run and hospital both speak."""

from __future__ import annotations

from pytest import mark, raises

from wardround.errors import ConfigError
from wardround.privacy import PrivacySettings, combine

NONE = PrivacySettings()


def test_a_run_may_ask_for_more_privacy() -> None:
    site = PrivacySettings(level="case", epsilon=8, delta=1e-5, cases=100)
    policy = combine(PrivacySettings(level="client", epsilon=2, delta=1e-6), site)

    assert (policy.run.level, policy.run.epsilon, policy.run.delta) == ("client", 2, 1e-6)
    assert policy.total == site


@mark.parametrize(
    "asked", [NONE, PrivacySettings(level="case", epsilon=99, delta=1e-3, scores="show", cases=7)]
)
def test_a_run_cannot_ask_for_less(asked: PrivacySettings) -> None:
    site = PrivacySettings(level="client", epsilon=2, delta=1e-6, clip=0.5, cases=100)

    assert combine(asked, site).run == site


def test_without_a_demand_of_the_hospital_the_run_decides() -> None:
    asked = PrivacySettings(level="case")

    assert combine(asked, NONE) == (asked, None)
    assert not combine(NONE, NONE).is_on


@mark.parametrize(
    "values", [{"epsilon": 0}, {"delta": 0.5}, {"clip": -1}, {"epsilon": True}, {"level": "all"}]
)
def test_settings_outside_of_their_range_are_refused(values: dict[str, object]) -> None:
    with raises(ConfigError, match=next(iter(values))):
        PrivacySettings.read(values)
