from wardround.configuring.plan import Choice, ConfigurationPlan


def test_choices_become_nested_sections() -> None:
    plan = ConfigurationPlan((Choice("rounds", 10, "the budget"), Choice("data.patch", [8, 8], "memory")))

    assert plan.settings() == {"rounds": 10, "data": {"patch": [8, 8]}}
