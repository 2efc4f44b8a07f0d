#!/usr/bin/env bash
# DATA="data=local data.path=CORPUS data.tokenizer.name=TOKENIZER" bash scripts/reproduce_lm.sh [NAME...]
#
# Trains language models of about 50M parameters on 30M tokens each, one after another: transformer, llama, mamba2, gla,
# retnet, rwkv7, delta_net, gated_delta_net, delta_product, gated_delta_product, hybrid_swa, hybrid_global2 (default: all;
# eval/lm_comparison.yaml). Then it reads the validation split with them to 32,768 tokens, in one process for all, and
# writes tables and a figure. A run that is complete is left alone, one that was cut off resumes.
#
#   HOME_DIR=runs/compare_50m     folder of the runs
#   PAGE=HOME_DIR/comparison.md   where the tables go; those of docs/results.md are of docs/reports/lm-50m
#   EVALUATE=0                    train only; a later call, with the same names or others, evaluates and writes
#   EVAL="documents=8"            other values for the evaluation (fla_train.eval.config.PerplexityConfig)
#   EXTRA="trainer.micro_batch_size=16"   more overrides for every run; other ones need another HOME_DIR
set -euo pipefail

home=${HOME_DIR:-runs/compare_50m}
comparison=(python -m fla_train.eval.lm_comparison)
read -ra shared <<< "experiment=compare_50m ${DATA:-data=stdlib} ${EXTRA:-}"
read -ra evaluation <<< "${EVAL:-}"
trap 'exit 130' INT TERM

plan=$("${comparison[@]}" plan "$@")
while read -r name overrides; do
  run=$home/$name
  [ -e "$run/complete" ] && { echo "complete     $run"; continue; }
  mkdir -p "$run"
  rm -f "$run/skipped"
  read -ra own <<< "$overrides"
  started=$SECONDS code=0
  fla-train "run.dir=$run" "${shared[@]}" "${own[@]}" > "$run/output.txt" 2>&1 < /dev/null || code=$?
  if [ $code -eq 0 ]; then
    touch "$run/complete"
    echo "done         $run in $((SECONDS - started)) s"
  else
    grep -m1 '^error' "$run/output.txt" > "$run/skipped" || echo "exit status $code, see $run/output.txt" > "$run/skipped"
    echo "skipped      $run: $(cat "$run/skipped")"
  fi
done <<< "$plan"

[ "${EVALUATE:-1}" != 0 ] || exit 0
"${comparison[@]}" evaluate "$home" "${evaluation[@]}"
"${comparison[@]}" write "$home" "${PAGE:-$home/comparison.md}"
