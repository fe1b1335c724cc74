#!/bin/sh
# A sweep: what r keys cost each kernel, chosen by weight, for the output, and the last r.
#
#     sh examples/sweep.sh [scale=hours] [kernel=elu] ...
#
# It needs trained models: make repro trains those of the default scale. It prints a table with a
# row for each kernel, method and r, beside exact attention, and writes sweep.csv and sweep.png.
exec python -m pipelines.evaluate -m experiment=r_and_kernels "$@"
