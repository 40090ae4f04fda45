#!/bin/bash
# Trains on two machines of eight GPUs under SLURM: sbatch experiments/launch/slurm.sh
#
# One process a GPU; JAX finds the others by SLURM's variables. Should a process end, srun ends all, and the job is put
# back into the queue and goes on from its last checkpoint. Three minutes before its time is up SLURM sends SIGTERM: all
# processes save the same step and end with 0, and the job goes back into the queue, too.
#SBATCH --job-name=gpt2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180

# On a disk that all machines see; not /tmp.
RUN=$HOME/runs/gpt2-$SLURM_JOB_ID

last() {
    find "$RUN/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' -printf '%f\n' 2>/dev/null | sort -n | tail -n 1
}

# A checkpoint is there from an earlier turn of this job: go on with it.
before=$(last)
[ -n "$before" ] && RESUME=--resume

# Not --gpus-per-task, with which each process would see its own GPU as number 0 and NCCL none of the others.
# Variables of a web proxy hang the start.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
srun --kill-on-bad-exit=1 python -m experiments.language_modeling --model gpt2 --policy mixed_bfloat16 \
    --mesh data=2,fsdp=8 --batch-size 256 --run-dir "$RUN" $RESUME
code=$?

# 2 is a flag or a folder that cannot be, and a turn that saved nothing may have diverged: the next one would end so, too.
[ $code -ne 2 ] && [ "$(last)" != "$before" ] && [ ! -e "$RUN/summary.json" ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
