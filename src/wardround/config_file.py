"""Read a configuration: from YAML, a dictionary or a Config, checked whole before anything starts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.builtin_configs import find_config
from wardround.config import Config, TrafficSettings
from wardround.data.serving.mirroring import find_mirror_axes
from wardround.errors import ConfigError
from wardround.losses.contrastive_objectives import probe_output
from wardround.losses.loss_function import NAME as LOSS_FUNCTION
from wardround.losses.loss_function import give_loss
from wardround.losses.objective import Objective
from wardround.methods import METHODS, OBJECTIVES, build_method, build_objective
from wardround.methods.base import Method
from wardround.models import check_dimensions
from wardround.models import resolve as find_model
from wardround.models.foreign_networks import give_network
from wardround.models.measure import features_text
from wardround.objects import digest, split_name
from wardround.plugins import NotInstalled
from wardround.privacy.checks import check_cards
from wardround.settings import shown
from wardround.training.inference import check_averaging
from wardround.training.sketch import sketch_model
from wardround.yaml_file import apply_override, read_yaml

log = logging.getLogger(__name__)


def load_config(
    source: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    model: Any = None,
    method: Any = None,
    objective: Any = None,
) -> Config:
    """A checked configuration from a YAML file, a built-in name, a dictionary or a Config, `a.b=c` on top.

    model, method, objective: names or objects in the place of the configuration's, as `wr.run` takes them.
    """
    objects = {"model": model, "method": method, "objective": objective}
    if (
        isinstance(source, Config)
        and not overrides
        and not any(found is not None for found in objects.values())
    ):
        return source
    label, values = read_values(source)
    name_objects(values, objects)
    for override in overrides:
        apply_override(values, override)
    return parse(values, label)


def read_values(source: str | Path | Mapping[str, Any] | Config) -> tuple[str, dict[str, Any]]:
    """What stands before a mistake in them, and the settings as they were given."""
    if isinstance(source, Config):
        return "", source.model_dump(mode="json")
    if isinstance(source, Mapping):
        return "", copy_sections(source)
    path = find_config(source)
    return f"{source}: ", find_federation(read_yaml(path), path)


def copy_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for us to change; what the user gave stays as it is."""
    return {key: copy_sections(value) if isinstance(value, dict) else value for key, value in values.items()}


# Objects in the place of names


def name_objects(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Put names in the place of objects, which this process then finds by them."""
    namers = {"model": name_model, "method": name_method, "objective": name_objective}
    for key, found in given.items():
        section = values.get(key)
        before = section if isinstance(section, dict) else {}
        keeps = key == "model" or found is None
        if found is None:
            found = before.get("name") if isinstance(section, dict | None) else section
            if found is None or isinstance(found, str):
                continue
        rest = {name: value for name, value in before.items() if keeps and name != "name"}
        named = {"name": found} if isinstance(found, str) else namers[key](found, before)
        values[key] = {**rest, **named}


def name_model(found: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": give_network(found, find_earlier_name(found, before))}


def name_method(found: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, Method):
        raise ConfigError(
            f"method is {shown(found)}; give a name, a subclass of wr.Method or an object of one."
        )
    return {"name": METHODS.give(kind, find_earlier_name(kind, before)), **read_fields(found)}


def name_objective(found: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, Objective):
        return {"name": OBJECTIVES.give(kind, find_earlier_name(kind, before)), **read_fields(found)}
    if not callable(found):
        raise ConfigError(
            f"objective is {shown(found)}; give a name, a loss of (logits, labels), a subclass of "
            "wr.Objective or an object of one."
        )
    return {"name": LOSS_FUNCTION, "function": give_loss(found, find_earlier_name(found, before))}


def read_fields(found: Any) -> dict[str, Any]:
    """The settings that an object of a method or objective holds; a class holds none."""
    if isinstance(found, type):
        return {}
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def find_earlier_name(found: Any, before: Mapping[str, Any]) -> str | None:
    """The name that a run wrote down of the same object, also where it lay in another module then."""
    names = [before.get("function"), before.get("name")]
    return next(
        (name for name in names if isinstance(name, str) and split_name(name)[1] == digest(found)), None
    )


# Files


def find_federation(values: dict[str, Any], source: Path) -> dict[str, Any]:
    """The values with data.federation beside the file that names it, or in the working directory."""
    data = values.get("data")
    named = data.get("federation") if isinstance(data, dict) else None
    if (
        not isinstance(data, dict)
        or not isinstance(named, str)
        or Path(named).is_absolute()
        or named.startswith("~")
    ):
        return values
    beside = source.parent / named
    if not beside.exists():
        return values
    if Path(named).exists() and not beside.samefile(named):
        raise ConfigError(
            f"{source}: data.federation is {named}, which is in the working directory and beside {source}. "
            "Give its whole path."
        )
    return values if Path(named).exists() else {**values, "data": {**data, "federation": str(beside)}}


def resolve(config: Config) -> dict[str, Any]:
    """Every setting written out, defaults and those of method and objective included."""
    method, objective = build_method(config), build_objective(config)
    plain = config.model_dump(mode="json")
    plain["method"] = {"name": config.method.get("name", "fedavg"), **dataclasses.asdict(method)}
    name = config.objective.get("name", method.objective)
    plain["objective"] = {"name": name, **dataclasses.asdict(objective)}
    plain["output"] = str(config.folder)
    return plain


def parse(values: Mapping[str, Any], label: str = "") -> Config:
    """Check everything that can be checked before a run, with one sentence for the first mistake."""
    if "datasets" in values and "about" in values:
        raise ConfigError(
            f"{label}this describes a paper's table, which is several runs on data of your own. "
            "See what it needs with: wardround papers show NAME"
        )
    if "sweep" in values:
        raise ConfigError(
            f"{label}this has a `sweep:` and is several runs. Run it with: wardround compare FILE"
        )
    try:
        config = Config.read(values)
        method, objective = build_method(config), build_objective(config)
        check_model(config)
        check_features(config, method, objective)
        if config.model.bn_stats == "pooled" and config.traffic.is_lossy:
            raise ConfigError(
                f"traffic.upload is {config.traffic.upload}, which rounds the mean squares that "
                "model.bn_stats: pooled sends, until variances vanish. Use upload: delta or another bn_stats."
            )
        check_inference(config, objective)
        check_average(config, method, objective)
        late = [number for number in config.evaluate.test_after if number > config.rounds]
        if late:
            raise ConfigError(
                f"evaluate.test_after names round {late[0]}, but there are {config.rounds}. Leave it out, or "
                "raise rounds."
            )
        check_cards(
            config.privacy,
            config.method.get("name", "fedavg"),
            method,
            config.objective.get("name", method.objective),
            objective,
        )
        check_secure_sum(config)
        method.check(config, objective)
        objective.check(config)
        for warning in objective.warnings(config):
            log.warning(warning)
    except ConfigError as error:
        raise ConfigError(label + str(error)) from None
    return config


def check_secure_sum(config: Config) -> None:
    """Refuse settings under which single updates would leave, or masked numbers would not arrive whole."""
    if config.evaluate.cross_site and (config.privacy.is_on or config.privacy.secure_sum):
        raise ConfigError(
            "evaluate.cross_site has every client send its own model, which privacy does not allow. Leave it "
            "out."
        )
    if not config.privacy.secure_sum:
        return
    if config.traffic != TrafficSettings():
        raise ConfigError(
            "privacy.secure_sum sends masked numbers, which can be neither rounded nor compressed. Leave "
            "traffic out."
        )
    if config.model.bn_stats == "reestimate":
        raise ConfigError(
            "model.bn_stats: reestimate sends the statistics of each client, which privacy.secure_sum does "
            "not allow. Use average or pooled."
        )


def check_inference(config: Config, objective: Objective) -> None:
    """Refuse windows and axes that the data do not have, and mirror images that cannot be averaged."""
    window, dimensions = config.evaluate.window, config.data.dimensions
    if window is not None and dimensions is not None and len(window) != dimensions:
        raise ConfigError(
            f"evaluate.window is {list(window)}, but the data are {dimensions}D; give {dimensions} numbers."
        )
    if dimensions is not None:
        find_mirror_axes(config.augmentation.mirror_axes, dimensions)
    if config.evaluate.tta:
        check_averaging(objective, config.augmentation.mirror_axes)


def check_average(config: Config, method: Method, objective: Objective) -> None:
    """Refuse an average of server models where clients use models of their own."""
    if config.model_average.name == "none":
        return
    model = sketch_model(config, objective)
    own = type(method).personal is not Method.personal or config.model.bn_stats == "local"
    if own or (model is not None and set(method.shared(model)) != set(model.state_dict())):
        what = "model.bn_stats is local" if config.model.bn_stats == "local" else f"method is {method.title}"
        raise ConfigError(
            f"model_average.name is {config.model_average.name}, but {what}: each client uses a model that "
            "is in part its own, and an average of the server's would not fit it. Set it to none."
        )


def check_model(config: Config) -> None:
    """Refuse a network that is not there, its settings, and data it is not made for.

    A network of the user's may lie elsewhere, as when an old run is looked at: then building it says so.
    """
    try:
        find_model(config.model)
    except NotInstalled as error:
        log.debug("%s", error)
    if config.data.dimensions is not None:
        check_dimensions(config.model, config.data.dimensions)


def check_features(config: Config, method: Method, objective: Objective) -> None:
    """Refuse a network that does not show the features somebody compares."""
    needs = method.needs | objective.needs
    is_asked = "features" in needs or config.model.deep_supervision
    model = sketch_model(config, objective) if is_asked else None
    if model is None or "features" not in needs:
        return
    if not model.has_features:
        raise ConfigError(
            f"objective or method needs encoder features, which model '{config.model.name}' does not offer "
            f"({features_text(model)}). Name a module in model.features, or choose another network."
        )
    if "decoder" in needs and probe_output(model).decoder is None:
        raise ConfigError(
            f"objective or method needs decoder features of the image's size, but the output layer of model "
            f"'{config.model.name}' is given smaller ones. Choose another network, for example unet2d."
        )
