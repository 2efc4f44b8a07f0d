#!/usr/bin/env bash
# HOSTS="node1 node2" GPUS=8 bash scripts/train_hosts.sh experiment=paper/deltaproduct_340m run.dir=/shared/runs/deltaproduct
#
# Several machines without a batch system: one `fla-train` on each by ssh, in this folder, which all of them must see, as
# they must run.dir. The first host is rank 0 and must be reachable by the others under the name given here. What the
# hosts print comes with their name in front. SSH overrides the command that reaches a host.
set -euo pipefail

read -ra hosts <<<"${HOSTS:?HOSTS names the machines: HOSTS=\"node1 node2\"}"
gpus=${GPUS:?GPUS is the number of GPUs of each machine}
pids=()
stop() { kill "${pids[@]}" 2>/dev/null || true; }
trap stop INT TERM EXIT

for rank in "${!hosts[@]}"; do
  command=$(printf '%q ' fla-train launch.max_restarts=3 "$@" launch.num_machines="${#hosts[@]}" launch.machine_rank="$rank" \
    launch.num_processes="$((gpus * ${#hosts[@]}))" launch.main_process_ip="${hosts[0]}")
  # -tt: the remote command ends when the connection does.
  ${SSH:-ssh -tt} "${hosts[rank]}" "cd $(printf '%q' "$PWD") && $command" \
    < /dev/null > >(sed -u "s/^/${hosts[rank]}: /") 2>&1 &
  pids+=($!)
done

status=0
for _ in "${pids[@]}"; do
  code=0
  wait -n || code=$?
  [ "$status" -ne 0 ] || status=$code
  [ "$code" -eq 0 ] || [ "$code" -eq 75 ] || stop # one has failed: the others would wait for it
done
exit "$status"
