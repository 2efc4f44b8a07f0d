#!/usr/bin/env bash
# bash scripts/reproduce_expressivity.sh [OPTION]...       (those of `fla-runs queue --help`)
#
# Trains every row of the papers' expressivity tables on seeds 0, 1 and 2 and writes them, with the published numbers
# beside ours, to runs/expressivity/tables.md. The same command continues.

# The table `extrapolation` has a row with the mixer of docs/examples/initial_beta.py.
export PYTHONPATH="$(dirname "$0")/../docs/examples${PYTHONPATH:+:$PYTHONPATH}"
exec fla-runs queue "$@"
