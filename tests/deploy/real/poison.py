"""Well-formed poison from one of five hospitals: the table of attacks, with default limits and without any.

    python tests/deploy/real/poison.py [--only on,off] [--keep]

Four hospitals train as real processes; the fifth has a valid kit and answers as it likes. Dice is the mean over
the four on their test cases, and must lie within 0.02 of the run in which the fifth is honest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from common import Checks, Command, Deployment, read, records, settings
from hostile import Caller
from parcels import as_file, find_request, sealed

from wardround.deploy.site import Site
from wardround.deploy.site_file import SiteFile
from wardround.deploy.wire import Parcel

ROGUE = "west"
CLAIM, ROUNDS, WITHIN = 10_000_000, 8, 0.02
OFF = {"max_norm": None, "refuse_opposite": False, "max_share": 1}
Change = Callable[[Parcel, Parcel], Parcel]  # of the request and the honest reply


def moved(factor: float) -> Change:
    """The honest update so many times."""

    def change(request: Parcel, reply: Parcel) -> Parcel:
        arrays = {
            key: request.arrays[key] + np.float32(factor) * (array - request.arrays[key])
            if array.dtype == np.float32
            else array
            for key, array in reply.arrays.items()
        }
        return sealed(reply, arrays)

    return change


def huge(request: Parcel, reply: Parcel) -> Parcel:
    arrays = {
        key: np.full_like(array, 1e30) if array.dtype == np.float32 else array
        for key, array in reply.arrays.items()
    }
    return sealed(reply, arrays)


def claimed(request: Parcel, reply: Parcel) -> Parcel:
    """The model as it was sent, in the name of ten million cases."""
    return sealed(
        reply,
        {key: request.arrays[key] for key in reply.arrays},
        more={**reply.header["more"], "num_examples": CLAIM},
    )


ATTACKS: dict[str, Change | None] = {
    "honest": None,
    "x -100": moved(-100.0),
    "sign flip": moved(-1.0),
    "1e30": huge,
    "10 million cases": claimed,
}


def answer(rogue: Caller, site: Site, hospitals: Deployment, command: Command, attack: str) -> None:
    """Take part until the run ends."""
    held: list[str] = []
    while command.is_running:
        rogue.call("Beat", b"{}")
        found = rogue.wait(2.0, held)
        if found is None:
            continue
        info, content = found
        held.append(str(info["letter"]))
        request = find_request(content, hospitals.folder)
        reply, change = site.answer(request), ATTACKS[attack]
        if request.header["task"] == "train" and change is not None:
            reply = change(request, reply)
        if request.header["task"] == "register" and attack == "10 million cases":
            scalars = dict(reply.header["scalars"])
            scalars["registration"] = {**scalars["registration"], "num_train": CLAIM}
            reply = sealed(reply, scalars=scalars)
        rogue.answer(info, as_file(reply, hospitals.folder))


def run_attacks(checks: Checks, hospitals: Deployment, rogue: Caller, limits: dict[str, Any] | None) -> None:
    clean = 0.0
    for number, attack in enumerate(ATTACKS):
        name = f"{'on' if limits is None else 'off'}-{number}"
        config = settings(
            name,
            rounds=ROUNDS,
            min_clients=4,
            data={"phantom": {"hospitals": 5, "size": 32, "cases": 24, "heterogeneity": 0.3}},
            model={"name": "unet2d", "base_filters": 8, "levels": 2},
            optimizer={"learning_rate": 0.02, "schedule": {"name": "cosine"}},
            evaluate={
                "metrics": ["dice"],
                "overlays": 0,
                "model": "last",
                "every": ROUNDS,
                "calibrate": False,
            },
            deadline=300.0,
            **({} if limits is None else {"limits": limits}),
        )
        rules = SiteFile.model_validate({"data": "phantom", "tasks": ["all"], "min_cases": 0})
        site = Site(ROGUE, rules, hospitals.folder / f"rogue-{name}")
        command = hospitals.submit(config, names=[*hospitals.names, ROGUE])
        answer(rogue, site, hospitals, command, attack)
        code = command.wait(60)
        lines, result = records(hospitals.run_folder(name)), read(hospitals.run_folder(name) / "result.json")
        found = (result.get("test") or {}).get("dice", {}).get("clients", {})
        scores = [entry["mean"] for client, entry in found.items() if client != ROGUE]
        dice = sum(scores) / len(scores) if scores else 0.0
        clean = dice if attack == "honest" else clean
        refused, lost = (
            sum(f"train/{ROGUE}" in line[kind] for line in lines) for kind in ("refused", "lost")
        )
        took_part = ROGUE in read(hospitals.run_folder(name) / "registrations.json")
        holds = took_part and (limits is not None or (code == 0 and abs(dice - clean) <= WITHIN))
        facts = {"dice": round(dice, 3), "refused": f"{refused} of {len(lines)}", "lost": lost, "code": code}
        checks.check(holds, f"{attack}, {'default limits' if limits is None else 'no limits'}", **facts)


def main() -> None:
    with Checks(str(__doc__)) as checks:
        names = ["east", "hospital-05", "north", "south"]
        with Deployment(names, checks.options.keep, guests=[ROGUE]) as hospitals:
            hospitals.serve()
            hospitals.join_all()
            with Caller(hospitals.kit(ROGUE)) as rogue:  # one for all: a second process would be refused
                rogue.hello()
                for part, limits in (("on", None), ("off", OFF)):
                    if checks.wants(part):
                        with checks.part("default limits" if part == "on" else "no limits, as before"):
                            run_attacks(checks, hospitals, rogue, limits)


if __name__ == "__main__":
    main()
