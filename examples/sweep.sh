#!/bin/sh
# A sweep: what r keys cost each kernel, chosen by weight, for the output, and the last r.
#
#     sh examples/sweep.sh [SCALE]
#
# It needs trained models: make repro trains those of the default scale. It prints a table with a
# row for each kernel, method and r, beside exact attention, and the names of sweep.csv and sweep.png.
set -e
python -m pipelines.evaluate -m experiment=r_and_kernels scale="${1:-laptop}"
