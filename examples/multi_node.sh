#!/bin/bash
# Several machines without a scheduler. On each of them, with the first one's address:
#   examples/multi_node.sh NODES HEAD[:PORT] SCRIPT [ARGUMENTS]
# A machine that dies and comes back may join again: after a restart the script goes on from its last checkpoint.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,4p' "$0" >&2
    exit 2
fi
nodes=$1 head=$2
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# After a restart a worker must not read a dead one's address out of the launcher's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# gloo guesses the interface from the host name, often wrongly: export GLOO_SOCKET_IFNAME=eth0 (NCCL_SOCKET_IFNAME on GPUs).
exec torchrun \
    --nnodes "$nodes" \
    --nproc-per-node "${PER_NODE:-1}" \
    --max-restarts "${RESTARTS:-10}" \
    --rdzv-id "${RUN_ID:-pufferfish}" --rdzv-backend c10d --rdzv-endpoint "$head" \
    "$@"
