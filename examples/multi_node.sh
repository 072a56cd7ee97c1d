#!/bin/bash
# Several machines without a scheduler. Run on each machine, with the address of the first one:
#   examples/multi_node.sh NODES HEAD[:PORT] SCRIPT [ARGUMENTS]
# A machine that was restarted may join again: the script then resumes from its last checkpoint.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,4p' "$0" >&2
    exit 2
fi
nodes=$1 head=$2
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Otherwise workers would read addresses of dead workers from the launcher's store after a restart.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# If gloo selects the wrong network interface: export GLOO_SOCKET_IFNAME=eth0 (NCCL_SOCKET_IFNAME on GPUs).
exec torchrun \
    --nnodes "$nodes" \
    --nproc-per-node "${PER_NODE:-1}" \
    --max-restarts "${RESTARTS:-10}" \
    --rdzv-id "${RUN_ID:-pufferfish}" --rdzv-backend c10d --rdzv-endpoint "$head" \
    "$@"
