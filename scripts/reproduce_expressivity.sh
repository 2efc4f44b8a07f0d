#!/usr/bin/env bash
# bash scripts/reproduce_expressivity.sh [TABLE...]     (formal, state_tracking, layers, s5, mqar, mad, regbench; default: all)
#
# Trains every row of the papers' expressivity tables and writes them, with the published numbers beside ours, to
# runs/expressivity/tables.md. The fast variants of the recipes on seeds 0, 1 and 2; a run that is complete is left alone,
# one that was cut off goes on.
#
#   JOBS=14     so many runs at once, long ones first; each has one thread, so that results are those of JOBS=1
#   GPUS=0,1    start runs on these GPUs in turn; by default all use one
#   LIMIT=180   seconds for one run: then it saves a checkpoint and leaves, and the table has its newest test
#   SEEDS=0 takes one seed, FULL=1 the papers' own lengths, ONLY a regular expression of run folders, EXTRA more overrides
#   for every run, HOME_DIR another folder: one for each choice of FULL and EXTRA, which are not mixed.
set -euo pipefail

home=${HOME_DIR:-runs/expressivity}
seeds=${SEEDS:-0,1,2}
full=(); [ -z "${FULL:-}" ] || full=(full)
IFS=, read -ra gpus <<< "${GPUS:-}"
limit=(); [ -z "${LIMIT:-}" ] || limit=(timeout --kill-after=60 "$LIMIT")
tables=("$@"); [ $# -gt 0 ] || tables=(formal state_tracking layers s5 mqar mad regbench)
export OMP_NUM_THREADS=1
trap 'trap - TERM; kill 0; exit 130' INT TERM

train() {  # one line of the plan: run.dir=... experiment=... OVERRIDE...
  local arguments run started seconds code=0
  read -ra arguments <<< "$1"
  run=${arguments[0]#run.dir=}
  [ -e "$run/complete" ] && { echo "complete     $run"; return; }
  mkdir -p "$run"
  rm -f "$run/skipped"
  echo "${arguments[*]:1} ${EXTRA:-}" > "$run/recipe"
  started=$SECONDS
  # shellcheck disable=SC2086  # EXTRA is a list
  "${limit[@]}" fla-train "${arguments[@]}" logger=none ${EXTRA:-} > "$run/output.txt" 2>&1 < /dev/null || code=$?
  seconds=$((SECONDS - started + $(cat "$run/wall_seconds" 2> /dev/null || echo 0)))
  case $code in
    0) touch "$run/complete"; echo "done         $run in $seconds s" ;;
    124) echo "cut          $run after $seconds s" ;;
    *) grep -m1 '^error' "$run/output.txt" > "$run/skipped" || echo "exit status $code, see $run/output.txt" > "$run/skipped"
       echo "skipped      $run: $(cat "$run/skipped")"
       return ;;
  esac
  echo "$seconds" > "$run/wall_seconds"
}

plan=$(python -m fla_train.eval.expressivity_table plan "$(IFS=,; echo "${tables[*]}")" "$home" "$seeds" "${full[@]}")
plan=$(grep -E "${ONLY:-.}" <<< "$plan") || { echo "error: ONLY='$ONLY' is in no run of ${tables[*]}" >&2; exit 1; }
# First of all, and for all runs: a table of two recipes would not say which number is whose.
while read -r run recipe; do
  run=${run#run.dir=} recipe="$recipe ${EXTRA:-}"
  if [ -e "$run/metrics.jsonl" ] && [ "$(cat "$run/recipe")" != "$recipe" ]; then
    echo "error: $run was trained by another recipe ($(< "$run/recipe")): give another HOME_DIR" >&2
    exit 1
  fi
done <<< "$plan"
started_runs=0
while IFS= read -r line; do
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n; done
  [ ${#gpus[@]} -eq 0 ] || export CUDA_VISIBLE_DEVICES=${gpus[started_runs++ % ${#gpus[@]}]}
  train "$line" &
done <<< "$plan"
wait
complete=0 skipped=0
while read -r run _; do
  run=${run#run.dir=}
  [ ! -e "$run/complete" ] || complete=$((complete + 1))
  [ ! -e "$run/skipped" ] || skipped=$((skipped + 1))
done <<< "$plan"
echo "of $(wc -l <<< "$plan") runs $complete are complete, $skipped were skipped"
python -m fla_train.eval.expressivity_table write "$home"
