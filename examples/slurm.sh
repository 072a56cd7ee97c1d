#!/bin/bash
# Several machines under Slurm: sbatch --nodes 4 examples/slurm.sh examples/resumable.py
#SBATCH --job-name=pufferfish
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --signal=TERM@120
# --signal: every task gets SIGTERM two minutes before the time limit, and pf.Checkpoint saves.
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Otherwise workers would read addresses of dead workers from the launcher's store after a restart.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --max-restarts 10 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:${PORT:-29500}" \
    "$@"
