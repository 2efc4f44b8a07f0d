#!/usr/bin/env bash
# bash scripts/train_node.sh experiment=paper/deltaproduct_340m run.dir=runs/deltaproduct
#
# All GPUs of this machine. It gives up when the workers fail a fourth time without a new checkpoint; what stops it for
# good is a fault of the config or the data, or an interrupt. Give the same command again to go on. GPUS overrides the count.
set -euo pipefail

gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
exec fla-train launch.num_processes="$((gpus > 0 ? gpus : 1))" launch.max_restarts=3 "$@"
