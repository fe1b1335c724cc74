#!/usr/bin/env bash
# One would guess that safetensors.numpy stores a Fortran-ordered array, such as weight.T, as its values, or refuses it as the torch form does.
# Since 0.8.0 it writes the memory as it lies under the array's shape: the file loads without a word and its values stand in other places.
# Transposed weights and many results of LAPACK are so ordered, and NumPy calls them contiguous. Release 0.7.0 stored the same array rightly.
# safetensors 0.8.0 (and 0.7.0 beside it). 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > order.py <<'PYTHON'
import sys

import numpy
import safetensors
from safetensors.numpy import load_file, save_file

weight = numpy.arange(6.0).reshape(3, 2)
save_file({"weight": weight.T}, "weight.safetensors")
loaded = load_file("weight.safetensors")["weight"]
print(f"safetensors {safetensors.__version__}: stored {weight.T.tolist()}, loaded {loaded.tolist()}")
sys.exit(0 if numpy.array_equal(loaded, weight.T) else 3)
PYTHON
echo "guess: what is loaded is what was stored"
python3 -m venv venv
for version in 0.7.0 0.8.0; do
    venv/bin/pip install --quiet --disable-pip-version-check numpy==2.4.6 "safetensors==$version"
    status=0
    venv/bin/python -I order.py || status=$?
    echo "seen:  $version exits with $status"
    case $version:$status in
        0.7.0:0 | 0.8.0:3) ;;
        *)
            echo "changed: $version does not behave so any more"
            exit 1
            ;;
    esac
done
