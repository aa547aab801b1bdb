#!/bin/bash
# A training by Slurm: sbatch deploy/slurm.sh DIRECTORY. One task on each machine, with all its
# GPUs; srun tells each who and where the others are. All machines see the DIRECTORY.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300  # to the program, before the time is over: it saves, and exits with 42
#SBATCH --requeue
#SBATCH --open-mode=append

MAX_RESTARTS=100

# A worker that is lost ends the others, at once.
srun --kill-on-bad-exit=1 python examples/multi_worker.py "${1:-checkpoints}"
code=$?
if [ "$code" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
