#!/bin/bash
# Train on several nodes of a Slurm cluster, one task for each GPU, until the run is done:
#   sbatch examples/gpu/slurm.sh examples/gpu/qwen3-8b-128k.toml --context.max_tokens_per_slot 16384
# The run's folder, the model and the corpus are on storage that all nodes share. docs/resume.md says what happens when.

#SBATCH --job-name=longspan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# A job that starts again, after a node has failed or by the line with scontrol below, writes on in the same log.
#SBATCH --requeue
#SBATCH --open-mode=append
# Ten minutes before the time is over this script gets SIGUSR1: time for a step and a save. "B:" sends it to the script,
# which so knows why the run stops, and not to the ranks, to which srun forwards it.
#SBATCH --signal=B:USR1@600

set -euo pipefail
STOPPED=75 REFUSED=2                     # exit statuses of the run: a signal stopped it after a save; an error to mend
RESTARTS=${LONGSPAN_RESTARTS:-3}         # in this job, after ranks were lost
LOGS=${LONGSPAN_LOGS:-logs}/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$LOGS"

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

step=0 warned=0 cancelled=0 interrupted=0
trap 'warned=1 interrupted=1; [ "$step" -eq 0 ] || kill -USR1 "$step"' USR1     # srun sends it on to every rank
trap 'cancelled=1 interrupted=1; [ "$step" -eq 0 ] || kill -TERM "$step"' TERM  # of scancel: saved, and not started again

wait_for_step() {  # sets $status, also where a signal interrupts the wait
    local code
    status=127
    while :; do
        code=0 interrupted=0
        wait "$step" || code=$?
        [ "$code" -eq 127 ] || status=$code
        [ "$interrupted" -eq 1 ] || break
    done
    step=0
}

end_or_requeue() {  # the job's end; where its time is over it starts again on whatever nodes are free
    if [ "$warned" -eq 1 ] && [ "$cancelled" -eq 0 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}

# First each node by itself: versions, GPUs, kernels, exactness. A node with a fault costs minutes here, and not the night.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --output="$LOGS/doctor-%N.log" longspan doctor &
step=$!
wait_for_step
if [ "$status" -ne 0 ]; then
    echo "longspan doctor ended with status $status on a node:"
    grep -H "✗\|error" "$LOGS"/doctor-*.log || true
    end_or_requeue
fi

# Slurm starts the ranks itself, with the variables that torchrun would set, so that its signals reach each of them. When
# one rank has ended, the others have two minutes to say what they saw.
attempt=0
while :; do
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID + attempt) % 20000))
    # shellcheck disable=SC2016  # the tasks expand these variables
    srun --kill-on-bad-exit=0 --wait=120 --output="$LOGS/run$attempt-rank%t.log" \
        bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID; exec "$@"' rank \
        longspan train "$@" --checkpoint.preempted_exit_code "$STOPPED" &
    step=$!
    wait_for_step
    echo "$(date +%FT%T) run $attempt of job $SLURM_JOB_ID ended with status $status; logs: $LOGS/run$attempt-rank*.log"
    [ "$status" -ne 0 ] || exit 0
    grep -h "^error\|^longspan:" "$LOGS/run$attempt"-rank*.log | sort -u | head -n 20 || true
    if [ "$warned" -eq 1 ] || [ "$cancelled" -eq 1 ] || [ "$status" -eq "$STOPPED" ] || [ "$status" -eq "$REFUSED" ]; then
        end_or_requeue
    fi
    [ "$attempt" -lt "$RESTARTS" ] || exit "$status"
    attempt=$((attempt + 1))
done
