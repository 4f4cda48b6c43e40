#!/usr/bin/env bash
# From invitations to the first result: an organiser and two hospitals on this machine, then everything ends.
#   bash examples/two_hospitals/run.sh [FOLDER]      a new folder for kits, scans and the run
set -euo pipefail

EXAMPLE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${1:-two_hospitals}
python=$(dirname "$(command -v wardround)")/python
[ ! -e "$work" ] || { echo "$work exists already. Give another folder, or remove it." >&2; exit 2; }
mkdir -p "$work"
cd "$work"

started=()
finish() { # SIGTERM to each; every one of them ends what it started
  [ ${#started[@]} -eq 0 ] || kill -TERM "${started[@]}" 2>/dev/null || true
  wait
}
trap finish EXIT

# Until a file has these words, as long as what writes it runs
wait_for() {
  until grep -q "$2" "$1.log"; do
    kill -0 "$3" 2>/dev/null || { cat "$1.log" >&2; exit 1; }
    sleep 0.5
  done
}

echo "== Two synthetic hospitals"
"$python" "$EXAMPLE/make_hospitals.py" hospitals

echo "== The organiser: authority, server, invitations"
wardround organiser setup --file "$EXAMPLE/project.yaml" --yes >organiser.log 2>&1 &
started+=($!)
wait_for organiser listening "${started[0]}"
cat organiser.log

echo "== Each hospital: its key, rules and cases"
for name in east north; do
  wardround hospital setup "kits/$name.invitation.json" --data "hospitals/$name" --yes >"$name.log" 2>&1 &
  started+=($!)
  wait_for "$name" "Put the answer here" "$!"
done

echo "== The organiser signs, and the hospitals take part"
wardround sign east.request.json north.request.json
wait_for east "connected to" "${started[1]}"
wait_for north "connected to" "${started[2]}"
cat east.log
wait_for organiser "east is connected" "${started[0]}"
wait_for organiser "north is connected" "${started[0]}"

echo "== A run"
wardround submit "$EXAMPLE/config.yaml" --kit kits/organiser
wardround status --kit kits/organiser

echo "== What left a hospital, and is that list whole?"
wardround egress show east
wardround egress verify east
wardround egress verify north

echo "== Done: $PWD/kits/organiser/runs/first/report.html"
