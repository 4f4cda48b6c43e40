"""A survey, a run planned from it and an evaluation at three hospitals with planted differences.

    python tests/deploy/real/survey.py [--keep] [--only survey,plan,evaluate]

A server and three hospitals on loopback, each with `wardround server` and `wardround join`. East spells and
orders its names in another way and accepts by itself; south has other voxels, brighter scans and a class more,
so that a person there must confirm; north sends sums over cases, never a row. The later parts need the first.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from common import WARDROUND, Checks, Deployment, Failed, read, since

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from planted import CYSTS, NAMES, plant

MINIMUM = 3  # patients or cases behind any number that leaves; a hospital has three test cases
SMALL = ("rounds=2", "local_steps=4", "model.base_filters=4", "evaluate.calibrate=false", "compute.threads=1")
PLANTED = {  # a phrase of the page -> what was planted
    "'east' writes classes in another way: 'Lesion' for 'lesion'": "names spelled in another way",
    "'east' has its classes in another order: Gland, Lesion": "classes in another order",
    "'east' has its channels in another order: adc, t2": "channels in another order",
    "class 'cyst' of 'south' is not at all hospitals": "a class that only one has",
    "'cyst' is labelled in few or no training cases of 'south'": f"a class in {CYSTS} patients",
    "'south' differs much in voxel spacing: 2 x 2 x 3 mm": "other voxels",
    "'south' differs much in brightness": "brighter scans",
    "'south' differs much in foreground size": "larger structures",
}


def write_rules(hospitals: Deployment) -> None:
    files = plant(hospitals.folder / "data")
    for name in NAMES:
        rules: dict[str, Any] = {"data": str(files[name]), "device": "cpu", "min_cases": 5, "threads": 1}
        rules |= {"accept": "auto", "min_count": MINIMUM}
        rules |= {"scores": "aggregate"} if name == "north" else {}
        (hospitals.kits / name / "site.yaml").write_text(yaml.safe_dump(rules))


def list_ledger(hospitals: Deployment, name: str, task: str) -> list[dict[str, Any]]:
    path = hospitals.kits / name / "state" / "egress.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["task"] == task]


def finish(hospitals: Deployment, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = hospitals.run(*arguments, "--kit", hospitals.organiser, seconds=600)
    if done.returncode != 0:
        raise Failed(f"wardround {arguments[0]} ended with {done.returncode}: {done.stderr[-800:]}")
    return done


def check_survey(checks: Checks, hospitals: Deployment) -> None:
    began = time.monotonic()
    found = json.loads(finish(hospitals, "survey", "--json").stdout)
    checks.check(sorted(found["hospitals"]) == sorted(NAMES), "all hospitals answered", seconds=since(began))
    page = (hospitals.organiser / "survey" / "survey.html").read_text(encoding="utf-8").replace("&#x27;", "'")
    for phrase, planted in PLANTED.items():
        checks.check(phrase in page, f"the page names: {planted}")
    checks.check("cyst" not in json.dumps(found["common"]["classes"]), "the class of one is not proposed")
    for name in NAMES:
        line = list_ledger(hospitals, name, "fingerprint")[-1]
        checks.check(
            line["scalars"]["fewest"] >= MINIMUM,
            f"{name}: the ledger has a line of the fingerprint, and the fewest cases behind a number",
            fewest=line["scalars"]["fewest"],
            bytes=line["bytes"],
        )
    sizes = found["hospitals"]["south"]["fingerprint"]["foreground"]
    checks.check(sizes["cyst"] is None, "nothing is told of the class that few patients have")
    decisions = found["decisions"]
    checks.check(
        decisions == {"east": "accepted", "north": "accepted", "south": "waiting"},
        "east and north accept by their rules, south asks a person",
    )


def check_plan(checks: Checks, hospitals: Deployment) -> Path:
    overrides = [word for setting in SMALL for word in ("--set", setting)]
    submit = ["submit", "--budget", "20", "--kit", hospitals.organiser, *overrides]
    refused = hospitals.run(*submit, seconds=300)
    checks.check(
        refused.returncode != 0 and "'south' must confirm" in refused.stderr,
        "a run waits for nobody: who must confirm is named",
        said=refused.stderr.strip().splitlines()[-1][-120:],
    )
    confirmed = hospitals.run("confirm", hospitals.kits / "south", "--yes")
    checks.check("class 'cyst' is left out" in confirmed.stdout, "south sees what it confirms")
    began = time.monotonic()
    done = hospitals.run(*submit, "--overwrite", seconds=600)
    run = hospitals.run_folder("real")
    checks.check(
        done.returncode == 0 and read(run / "result.json").get("status") == "done",
        "a run without a configuration is planned from the survey, and trains",
        seconds=since(began),
    )
    checks.check("median of the training cases" in done.stdout, "what was chosen is said")
    file = hospitals.folder / "run.yaml"
    survey = hospitals.organiser / "survey" / "survey.json"
    made = hospitals.run("configure", survey, "-o", file, "--budget", "20")
    data = yaml.safe_load(file.read_text())["data"]
    checks.check(
        made.returncode == 0 and data["common"]["classes"] == ["lesion", "gland"],
        "`wardround configure survey.json` writes the same as a file to edit",
    )
    return run


def check_evaluation(checks: Checks, hospitals: Deployment, run: Path) -> None:
    exported = hospitals.folder / "exported"
    export = [*WARDROUND, "export", str(run), "--to", "torch", "-o", str(exported)]
    made = subprocess.run(export, capture_output=True, text=True, timeout=300)
    checks.check(made.returncode == 0, "the model is exported", said=made.stderr[-200:])
    scores = {}
    for kind, model in (("run", run), ("package", exported)):
        began = time.monotonic()
        name = f"judged-{kind}"
        done = finish(hospitals, "submit", "--evaluate", model, "--set", f"name={name}", "--json")
        folder = hospitals.run_folder(name)
        rows = list(csv.DictReader((folder / "cases.csv").open(encoding="utf-8")))
        who = {row["client"] for row in rows}
        found = json.loads(done.stdout)
        scores[kind] = found["summary"]["dice"]["clients"]
        checks.check(
            sorted(scores[kind]) == sorted(NAMES), f"{kind}: every hospital judged it", seconds=since(began)
        )
        checks.check(who == {"east", "south"}, f"{kind}: no row of a case of north has left")
        page = (folder / "report.html").read_text(encoding="utf-8")
        checks.check("sent sums over cases" in page, f"{kind}: the page says what its interval is from")
        line = list_ledger(hospitals, "north", "evaluate")[-1]
        checks.check(
            "cases" not in line["scalars"] and line["scalars"]["fewest"] >= MINIMUM,
            f"{kind}: the ledger of north has sums alone",
            fewest=line["scalars"]["fewest"],
        )
    checks.check(scores["run"] == scores["package"], "a run and its export have the same scores")
    for name in NAMES:
        verified = hospitals.run("egress", "verify", hospitals.kits / name)
        checks.check(verified.returncode == 0, f"{name}: the ledger is whole")


def main() -> None:
    with Checks(__doc__ or "") as checks, Deployment(NAMES, checks.options.keep) as hospitals:
        write_rules(hospitals)
        hospitals.serve()
        hospitals.join_all()
        with checks.part("survey"):
            check_survey(checks, hospitals)
        if checks.wants("plan") or checks.wants("evaluate"):
            with checks.part("plan"):
                run = check_plan(checks, hospitals)
            if checks.wants("evaluate"):
                with checks.part("evaluate"):
                    check_evaluation(checks, hospitals, run)


if __name__ == "__main__":
    main()
