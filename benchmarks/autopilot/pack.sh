#!/usr/bin/env bash
# Packs what run.py needs for a GPU machine without a network: packages for Python 3.12 and the four sets.
#
#   benchmarks/autopilot/pack.sh DATA FOLDER        writes FOLDER/packages.tar.xz and FOLDER/data.tar
#   there:  mkdir -p /tmp/autopilot && tar -xJf FOLDER/packages.tar.xz -C /tmp/autopilot && tar -xf FOLDER/data.tar -C /tmp/autopilot
#           PYTHONPATH=/tmp/autopilot/site:src python3 benchmarks/autopilot/run.py --data /tmp/autopilot/data ...
#
# The machine has PyTorch, numpy, scipy, scikit-image, scikit-learn, pandas, matplotlib, rich, typer, tqdm, PyYAML,
# safetensors, einops and Pillow. SimpleITK is left out for its size: nnU-Net imports it but reads our files with
# nibabel and scikit-image.
set -euo pipefail
data=${1:?usage: pack.sh DATA FOLDER}; out=${2:?usage: pack.sh DATA FOLDER}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/wheels" "$work/site"
fetch() {
  pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 -d "$work/wheels" "$@" 2> "$work/pip.log" ||
    { cat "$work/pip.log" >&2; exit 1; }
}
fetch monai nibabel "pydantic>=2" annotated-types typing-inspection typing-extensions psutil \
  nnunetv2==2.8.1 batchgenerators==0.25.5 batchgeneratorsv2==0.3.6 dynamic-network-architectures==0.4.4 \
  blosc2==3.7.2 ndindex numexpr msgpack py-cpuinfo platformdirs requests urllib3 idna charset-normalizer certifi \
  connected-components-3d fft-conv-pytorch seaborn threadpoolctl tifffile
core=$(unzip -p "$work"/wheels/pydantic-[0-9]*.whl '*/METADATA' | sed -n 's/^Requires-Dist: \(pydantic-core==[0-9.]*\).*/\1/p')
fetch "$core"
pip wheel -q --no-deps -w "$work/wheels" acvl-utils==0.2.6 2> "$work/pip.log" || { cat "$work/pip.log" >&2; exit 1; }
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
echo '"""Stands in for SimpleITK, which nnU-Net imports and the benchmark does not use."""' > "$work/site/SimpleITK.py"
rm -rf "$work"/site/*/tests "$work"/site/nibabel/*/tests "$work"/site/seaborn/colors/*.png
tar -cJf "$out/packages.tar.xz" -C "$work" site
tar -cf "$out/data.tar" --transform 's,^,data/,' -C "$data" hippocampus lgg3d fundus_odoc polyp4
du -m "$out/packages.tar.xz" "$out/data.tar"
