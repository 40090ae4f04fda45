#!/bin/bash
# Trains on two machines of eight GPUs under SLURM: sbatch experiments/launch/slurm.sh
#
# Each GPU has one process. JAX finds the other processes by SLURM's variables. If a process fails, srun ends all of
# them. The job then goes back into the queue and continues from its last checkpoint. Three minutes before the time is
# up, SLURM sends SIGTERM. All processes then save the same step and end with 0, and the job also goes back into the
# queue.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180

# This folder must be on a disk that all machines share, so not in /tmp.
RUN=$HOME/runs/gpt2-$SLURM_JOB_ID

last() {
    find "$RUN/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' -printf '%f\n' 2>/dev/null | sort -n | tail -n 1
}

# If an earlier start of this job left a checkpoint, continue from it.
before=$(last)
[ -n "$before" ] && RESUME=--resume

# Do not use --gpus-per-task: each process would see only its GPU, and NCCL could not reach the others.
# The start would hang if the variables of a web proxy were set.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
srun --kill-on-bad-exit=1 python -m experiments.language_modeling --model gpt2 --policy mixed_bfloat16 \
    --mesh data=2,fsdp=8 --batch-size 256 --run-dir "$RUN" $RESUME
code=$?

# Requeue the job unless it is finished or would fail again. Exit code 2 means that a flag or a folder is wrong, and a
# start that saved no checkpoint may have diverged.
[ $code -ne 2 ] && [ "$(last)" != "$before" ] && [ ! -e "$RUN/summary.json" ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
