"""Five methods, three hospitals, three rounds: the bytes of `wardround train`. About two minutes."""

import time

from common import Checks, Deployment, fingerprint, settings, since, trained

NAMES = ["north", "east", "south"]
METHODS = ("fedavg", "scaffold", "fedbn", "fedevi", "safcf")
BATCH_NORM = {"name": "unet2d", "base_filters": 4, "levels": 3, "norm": "batch"}  # for FedBN to keep


def main() -> None:
    with Checks(__doc__) as checks, Deployment(NAMES, checks.options.keep) as hospitals:
        began = time.monotonic()
        hospitals.serve()
        hospitals.join_all()
        checks.check(True, "one server and three hospitals are connected", seconds=since(began))
        for method in METHODS:
            if not checks.wants(method):
                continue
            with checks.part(method):
                config = settings(method, method, **({"model": BATCH_NORM} if method == "fedbn" else {}))
                began = time.monotonic()
                expected = trained(hospitals.folder, config)
                alone = since(began)
                began = time.monotonic()
                hospitals.wait_done(hospitals.submit(config), method, 300)
                found = fingerprint(hospitals.run_folder(method))
                same = found == expected and len(found) == 64
                checks.check(
                    same,
                    f"{method}: {found[:12]} at the hospitals, {expected[:12]} with train",
                    seconds=since(began),
                    train_seconds=alone,
                )
        for name in hospitals.names:
            checks.check(hospitals.ledger_holds(name), f"the ledger of {name} verifies")


if __name__ == "__main__":
    main()
