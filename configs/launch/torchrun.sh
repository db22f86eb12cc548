#!/bin/bash
# A run on several nodes without a scheduler: start the same command on each of them, with its own NODE_RANK.
#
#   NODES=2 NODE_RANK=0 HEAD=10.0.0.1 GPUS=8 configs/launch/torchrun.sh sft sft/llama3.1_8b_8x80gb      on the first node
#   NODES=2 NODE_RANK=1 HEAD=10.0.0.1 GPUS=8 configs/launch/torchrun.sh sft sft/llama3.1_8b_8x80gb      on the second
#
# The arguments are those of `alignment`. HEAD is the first node's address, PORT its port (29500 unless set). SHARD=fsdp2 is
# the default; SHARD=ddp keeps the whole model on every GPU. DeepSpeed needs a launch file: use slurm.sh or `accelerate launch`.
# Code, config and data must be visible under the same paths on every node; the run compares them at its start.
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: NODES=N NODE_RANK=K HEAD=ADDRESS GPUS=G $0 VERB CONFIG [key=value ...]" >&2; exit 2; }
case ${SHARD:-fsdp2} in
  fsdp2) export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 ;;
  ddp) ;;
  *) echo "SHARD=${SHARD}: give fsdp2 or ddp" >&2; exit 2 ;;
esac
program=(-m alignment)
[ -z "${ALIGNMENT_STOPPED:-}" ] || program=(--no-python bash "$(dirname "$0")/rank.sh") # under slurm_servers.sh
exec python -m torch.distributed.run \
  --nnodes "${NODES:?number of nodes}" --node_rank "${NODE_RANK:?this node, from 0}" --nproc_per_node "${GPUS:?GPUs a node}" \
  --master_addr "${HEAD:?address of the first node}" --master_port "${PORT:-29500}" "${program[@]}" "$@"
