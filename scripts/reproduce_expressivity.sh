#!/usr/bin/env bash
# bash scripts/reproduce_expressivity.sh [TABLE...]     (formal, state_tracking, layers, s5, mqar; default: all)
#
# Trains every row of the papers' expressivity tables and writes them, with the published numbers beside ours, to
# runs/expressivity/tables.md. The fast variants of the recipes on seeds 0, 1 and 2, one run after another; a run that is
# complete is left alone, one that was cut off goes on. SEEDS=0 takes one seed, FULL=1 the papers' own lengths, ONLY a
# regular expression of run folders, EXTRA more overrides for every run, HOME_DIR another folder.
set -euo pipefail

home=${HOME_DIR:-runs/expressivity}
seeds=${SEEDS:-0,1,2}
full=(); [ -z "${FULL:-}" ] || full=(full)
tables=("$@"); [ $# -gt 0 ] || tables=(formal state_tracking layers s5 mqar)

train() {  # one line of the plan: run.dir=... experiment=... OVERRIDE...
  local arguments run started code=0
  read -ra arguments <<< "$1"
  run=${arguments[0]#run.dir=}
  [ -e "$run/wall_seconds" ] && { echo "complete     $run"; return; }
  mkdir -p "$run"
  started=$SECONDS
  # shellcheck disable=SC2086  # EXTRA is a list
  fla-train "${arguments[@]}" logger=none ${EXTRA:-} > "$run/output.txt" 2>&1 < /dev/null || code=$?
  if [ "$code" -ne 0 ]; then
    echo "skipped      $run: $(grep -m1 '^error' "$run/output.txt" || echo "exit status $code, see $run/output.txt")"
    [ "$code" -ne 130 ] || exit 130
    return
  fi
  echo $((SECONDS - started)) > "$run/wall_seconds"
  echo "done         $run in $((SECONDS - started)) s"
}

for table in "${tables[@]}"; do
  plan=$(python -m fla_train.eval.expressivity_table plan "$table" "$home" "$seeds" "${full[@]}")
  while IFS= read -r line; do
    train "$line"
  done < <(grep -E "${ONLY:-.}" <<< "$plan")
done
python -m fla_train.eval.expressivity_table write "$home"
