"""From the `data:` section of a run to its federation: real cases, or synthetic hospitals."""

from __future__ import annotations

from dataclasses import replace

from wardround.data.cases import TensorSplit
from wardround.data.federation import Federation, ScanSummary
from wardround.data.federation_file import PrepareSettings
from wardround.data.phantom import cases as phantom
from wardround.data.serving.loading import federation_of
from wardround.data.serving.resident import Residence
from wardround.data.serving.reuse import LoadedCases
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError
from wardround.seeds import derive
from wardround.text import suggest

loaded_cases = LoadedCases()  # of this process; on where it does several runs


def open_federation(settings: DataSettings, seed: int, resident: Residence = "auto") -> Federation:
    """The federation a run asks for, not loaded yet; resident: where loaded cases will be."""
    found = loaded_cases.wrap(open_all(settings, seed, resident), resident)
    if not settings.test:
        found = leave_out_test(found)
    if settings.proxy is None:
        return found
    if settings.proxy not in found.names:
        raise ConfigError(
            f"data.proxy is '{settings.proxy}', which is not a centre."
            f"{suggest(settings.proxy, found.names)} There are: {', '.join(found.names)}."
        )
    clients = [name for name in found.names if name != settings.proxy]
    if not clients:
        raise ConfigError(f"data.proxy is '{settings.proxy}', the only centre; no client is left.")
    return replace(found, names=clients, proxy=settings.proxy)


def leave_out_test(federation: Federation) -> Federation:
    """Without test cases, wherever they come from; those of files are not opened in the first place."""
    load = federation.load_one
    return replace(federation, load_one=lambda name: replace(load(name), test=TensorSplit.of([])))


def open_all(settings: DataSettings, seed: int, resident: Residence) -> Federation:
    """Every centre of the data, the server's own included."""
    if settings.hospitals:
        raise ConfigError(
            "data.hospitals: the cases are at the hospitals. Run it there with: wardround submit CONFIG; or "
            "set data.federation to cases on this machine."
        )
    if settings.in_memory:
        raise ConfigError(
            "data.in_memory: the cases of this run are handed over in Python. Give them again: "
            "wr.run(config, data={client: cases})."
        )
    if settings.federation is not None:
        return federation_of(settings.federation, settings, seed, resident)
    made = settings.phantom
    names = phantom.list_hospitals(made)
    labels = {name: [number] for number, name in enumerate(made.classes, start=1)}
    data_seed = made.seed if made.seed is not None else derive(seed, "data")
    return Federation(
        names=names,
        counts={name: phantom.count_cases(made, name) for name in names},
        dimensions=made.dimensions,
        in_channels=made.channels,
        num_classes=len(made.classes) + 1,
        regions={"lesion": [1, 2], "core": [2]} if made.num_classes == 3 else labels,
        load_one=lambda name: phantom.make_client(made, name, data_seed),
        labels=labels,
        prepare=PrepareSettings(orientation="PLS"),  # the axes of a synthetic head
        summarise_scans=lambda: ScanSummary(None, made.shape),
        version=lambda: f"{made!r} {data_seed}",
        channels=made.channel_names if made.lacks else (),
        lacks={
            name: dict.fromkeys(made.lacks[name], phantom.count_cases(made, name))
            for name in names
            if made.lacks.get(name)
        },
    )
