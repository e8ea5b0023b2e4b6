#!/bin/bash
# Train on several nodes of a Slurm cluster, one task for each GPU:
#   sbatch examples/gpu/slurm.sh examples/gpu/qwen3-8b-128k.toml --context.max_tokens_per_slot 16384
# The run's folder, the model and the corpus are on storage that all nodes share.

#SBATCH --job-name=longspan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Ten minutes before the time is over every rank gets SIGTERM: the run ends its step, saves and stops. Submit the same
# command again, on as many nodes as you like, and it goes on from there.
#SBATCH --signal=TERM@600

set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Slurm starts the ranks itself, with the variables that torchrun would set, so that its signal reaches each of them.
srun --kill-on-bad-exit=1 bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank longspan train "$@"
