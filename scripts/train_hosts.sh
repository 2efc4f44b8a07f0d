#!/usr/bin/env bash
# HOSTS="node1 node2" bash scripts/train_hosts.sh experiment=paper/deltaproduct_340m run.dir=/shared/runs/deltaproduct
#
# Several machines without a batch system: one `fla-train` on each by ssh, in this folder, which all of them must see, as
# they must run.dir. The first host serves the store and must be reachable by the others under the name given here. What the
# hosts print comes with their name in front. SIGTERM and Ctrl-C have all of them save a checkpoint, for which this script
# waits; it ends with 75 then. A second one does not wait. SSH overrides the command that reaches a host. Bash 5.1 or newer.
set -euo pipefail

read -ra hosts <<<"${HOSTS:?HOSTS names the machines: HOSTS=\"node1 node2\"}"
mark=/tmp/fla-train-hosts-$$-$RANDOM # on each host, with its rank: the number of its process
declare -A pids=() # of the connections, by rank

stop() {
  for rank in "${!pids[@]}"; do
    ${SSH:-ssh -tt} "${hosts[rank]}" "kill \$(cat $mark-$rank)" < /dev/null > /dev/null 2>&1 &
  done
}
trap 'trap - INT TERM; stop' INT TERM
trap 'kill "${pids[@]}" 2> /dev/null || true' EXIT

for rank in "${!hosts[@]}"; do
  command=$(printf '%q ' fla-train launch.max_restarts=3 "$@" launch.num_machines="${#hosts[@]}" \
    launch.main_process_ip="${hosts[0]}")
  marked="sh -c $(printf '%q' "echo \$\$ > $mark-$rank; exec $command")"
  # -tt: the remote command hears of it when the connection ends.
  ${SSH:-ssh -tt} "${hosts[rank]}" "cd $(printf '%q' "$PWD") && { $marked; code=\$?; rm -f $mark-$rank; exit \$code; }" \
    < /dev/null > >(sed -u "s/^/${hosts[rank]}: /") 2>&1 &
  pids[$rank]=$!
done

status=0
while [ ${#pids[@]} -gt 0 ]; do
  code=0 ended=
  wait -n -p ended "${pids[@]}" || code=$?
  if [ -z "${ended:-}" ]; then
    [ "$code" -ne 127 ] || break # there is none left
    continue # a signal came first
  fi
  for rank in "${!pids[@]}"; do
    [ "${pids[$rank]}" != "$ended" ] || unset "pids[$rank]"
  done
  [ "$status" -ne 0 ] || status=$code
  [ "$code" -eq 0 ] || [ "$code" -eq 75 ] || stop # one has failed: the others would wait for it
done
exit "$status"
