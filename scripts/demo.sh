#!/usr/bin/env bash
# bash scripts/demo.sh [RUN_DIR]        (or `make demo`, which installs first)
#
# The whole path in about ten minutes on two CPU cores: check the machine, train a small Gated DeltaProduct on the
# source text of Python's standard library, kill the run in the middle, resume it, evaluate, plot, generate, and load
# the result with plain transformers. With a GPU the same commands use it.
set -euo pipefail

run=${1:-runs/demo}
[ ! -e "$run" ] || { echo "error: $run exists; remove it or name another folder: bash scripts/demo.sh runs/demo2" >&2; exit 2; }
train=(fla-train model=gated_delta_product/tiny data=stdlib experiment=demo run.dir="$run")
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/6  Check this machine and the operator's backends"
fla-doctor

step "2/6  Train, and kill the run with SIGKILL after its first checkpoint"
"${train[@]}" &
launcher=$!
until compgen -G "$run/checkpoints/step-*" >/dev/null; do
  kill -0 "$launcher" 2>/dev/null || { echo "error: training stopped before its first checkpoint" >&2; exit 1; }
  sleep 1
done
kill -9 "$launcher"
wait "$launcher" 2>/dev/null || true
echo "killed; the run folder holds: $(ls "$run/checkpoints")"

step "3/6  Resume to the end (the loss curve is bit-equal to an uninterrupted run's)"
"${train[@]}" trainer.resume=auto

step "4/6  Perplexity against context length, on held-out files"
fla-eval checkpoint="$run" suite=perplexity

step "5/6  Generate"
fla-generate checkpoint="$run" prompt="def __init__(self" max_new_tokens=120

step "6/6  Load with transformers"
python - "$run" <<'PY'
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import fla_train.models.auto  # registers the model type

folder = max(Path(sys.argv[1], "hf").glob("step-*"))
model = AutoModelForCausalLM.from_pretrained(folder)
tokens = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt")
print(f"{type(model).__name__} from {folder}: logits {tuple(model(**tokens).logits.shape)}")
PY

cat <<END

Everything is in $run: config.yaml, metrics.jsonl, train.log, checkpoints/, hf/, plots/loss.png, eval/.
Next: fla-train --help                                    every setting, with its unit and default
      fla-train model=delta_net/tiny data=stdlib          another model
      fla-export checkpoint=$run hub.repo_id=YOU/NAME     push it to the Hugging Face Hub
END
