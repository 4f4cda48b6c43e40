#!/usr/bin/env bash
# From kits to the first result: an organiser and two hospitals on this machine, then everything ends.
#   bash examples/two_hospitals/run.sh [FOLDER]      a new folder for kits, scans and the run
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
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

echo "== Two synthetic hospitals"
"$python" "$here/make_hospitals.py" hospitals

echo "== Kits"
wardround provision "$here/project.yaml" -o kits
wardround preflight kits/organiser

echo "== The organiser's server"
wardround server kits/organiser >server.log 2>&1 &
started+=($!)
until grep -q listening server.log; do
  kill -0 "${started[0]}" 2>/dev/null || { cat server.log >&2; exit 1; }
  sleep 0.5
done

echo "== Each hospital: is all well? Then take part"
for name in east north; do
  wardround preflight "kits/$name" --data "hospitals/$name/federation.yaml"
  wardround join "kits/$name" --data "hospitals/$name/federation.yaml" >"$name.log" 2>&1 &
  started+=($!)
done
for _ in $(seq 60); do
  [ "$(grep -c 'is connected' server.log || true)" -lt 2 ] || break
  sleep 1
done

echo "== A run"
wardround submit "$here/config.yaml" --kit kits/organiser
wardround status --kit kits/organiser

echo "== What left a hospital, and is that list whole?"
wardround egress show kits/east
wardround egress verify kits/east
wardround egress verify kits/north

echo "== Done: $PWD/kits/organiser/runs/first/report.html"
