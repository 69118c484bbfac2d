#!/bin/sh
# Predicts with an exported file in a new environment that has vitrail but not torch: docs/deploy.md.
# Usage: examples/deploy.sh MODEL.onnx|MODEL.xml IMAGES...
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
model=$1
case $model in *.xml) runtime=openvino ;; *) runtime=onnxruntime ;; esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint $here/constraints.txt"
$pip numpy pillow pyyaml tqdm "$runtime"
$pip --no-deps "$here"
if "$folder/venv/bin/python" -c "import torch" 2>/dev/null; then
    echo "torch is installed, so this proves nothing." >&2
    exit 1
fi
unset PYTHONPATH
"$folder/venv/bin/vitrail" predict "$@"
