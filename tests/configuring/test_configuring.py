from wardround.configuring.plan import Choice, ConfigurationPlan, override_plan


def test_choices_become_nested_sections() -> None:
    plan = ConfigurationPlan((Choice("rounds", 10, "the budget"), Choice("data.patch", [8, 8], "memory")))

    assert plan.settings() == {"rounds": 10, "data": {"patch": [8, 8]}}


def test_settings_of_the_user_take_the_place_of_choices() -> None:
    plan = ConfigurationPlan(
        (
            Choice("rounds", 10, "the budget"),
            Choice("model.name", "nnunet", "a U-Net"),
            Choice("model.levels", 4, "shape"),
            Choice("augmentation", {"mirror": 0.5, "chances": {"noise": 0.1}}, "nnU-Net's"),
        )
    )

    changed = override_plan(
        plan, ["rounds=3", "augmentation.chances.noise=0.2", "model={name: unet3d}", "seed=7"]
    )

    assert changed.settings() == {
        "rounds": 3,
        "augmentation": {"mirror": 0.5, "chances": {"noise": 0.2}},
        "model": {"name": "unet3d"},
        "seed": 7,
    }
    assert plan.settings()["augmentation"]["chances"] == {"noise": 0.1}
    assert changed.choices[0].reason == "as you set it; the plan had 10"
    assert changed.choices[1].reason == "nnU-Net's; augmentation.chances.noise as you set it"


def test_a_method_of_the_users_leaves_the_settings_of_the_plans_aside() -> None:
    plan = ConfigurationPlan(
        (
            Choice("method.name", "fedavg", ""),
            Choice("method.weighting", "samples", ""),
            Choice("rounds", 2, ""),
        )
    )

    found = override_plan(plan, ["method.mu=0.1", "method.name=fedprox"]).settings()
    assert found == {"method": {"name": "fedprox", "mu": 0.1}, "rounds": 2}
    assert override_plan(plan, ["rounds=3"]).settings()["method"]["weighting"] == "samples"


def test_what_follows_from_a_setting_of_the_users_follows() -> None:
    plan = ConfigurationPlan(
        (
            Choice("data.patch", [32, 32], "memory"),
            Choice("local_steps", 5, ""),
            Choice("evaluate.window", [32, 32], "the patch of training"),
        )
    )

    found = override_plan(plan, ["data.patch=[16, 16]", "local_epochs=1"])
    assert found.settings() == {
        "data": {"patch": [16, 16]},
        "evaluate": {"window": [16, 16]},
        "local_epochs": 1,
    }
    assert found.choices[1].reason == "the patch that you set; the plan had [32, 32]"
    own = override_plan(plan, ["evaluate.window=[24, 24]", "data.patch=[16, 16]"]).settings()
    assert own["evaluate"]["window"] == [24, 24]
