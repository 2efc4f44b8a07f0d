#!/usr/bin/env bash
# bash scripts/scaling.sh FOLDER [KEY=VALUE...]
#
# Times training steps on 1, 2, 4 ... GPUs of this machine with the same micro-batch on each (weak scaling), and writes
# FOLDER/N.json. Divide tokens_per_second by N and by the value on one GPU for the efficiency. For strong scaling set
# trainer.global_batch_tokens, which is otherwise one micro-batch per GPU.
set -euo pipefail

folder=$1
shift
mkdir -p "$folder"
gpus=$(nvidia-smi --list-gpus | wc -l)
for ((n = 1; n <= gpus; n *= 2)); do
  tokens=$((n * ${MICRO_BATCH:-16} * ${SEQ_LEN:-2048}))
  fla-bench train --json "$folder/$n.json" "launch.num_processes=$n" "trainer.seq_len=${SEQ_LEN:-2048}" \
    "trainer.micro_batch_size=${MICRO_BATCH:-16}" "trainer.global_batch_tokens=$tokens" "$@"
done
