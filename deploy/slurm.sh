#!/usr/bin/env bash
# Training on several machines of a Slurm cluster, one torchrun on each:
#
#     sbatch --nodes 4 deploy/slurm.sh s3://bucket/photos photos --model vit_b16
#
# The arguments are the data, the name of the run in runs/, and options of `vitrail train`. A job that Slurm starts again
# resumes the run with the settings that it began with. Change the lines of #SBATCH to your cluster; runs/ must be on a
# file system that all machines share.
#SBATCH --job-name=vitrail
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: sbatch deploy/slurm.sh DATA NAME [options of vitrail train, but not --name and --out]" >&2
    exit 2
fi
data=$1 name=$2
shift 2
machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${machines%%$'\n'*}
export VITRAIL_CACHE=${SLURM_TMPDIR:-/tmp}/vitrail # of each machine: remote shards are stored here
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1        # tells a new machine where the others meet
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK     # which srun does not inherit
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

if [ -e "runs/$name/config.yaml" ]; then
    arguments=(--resume "runs/$name")
else
    arguments=("$data" --name "$name" --workers 6 "$@")
fi
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID" --max-restarts 3 \
    -m vitrail train "${arguments[@]}"
