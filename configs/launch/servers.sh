#!/bin/bash
# PPO on one machine with vLLM: a server on each of some GPUs, training on the others.
#
#   SERVER_GPUS=0,1 TRAINER_GPUS=2,3 configs/launch/servers.sh runs/mine/sft/model ppo ppo.yaml training.max_steps=100
#
# The first argument is the config's policy, which the servers load; the others are those of `alignment`. Of a LoRA, say its
# rank: LORA_RANK=32. LAUNCH is a launch file (DDP unless set), WEIGHTS the folder through which the servers get new weights
# (runs/weights unless set; in memory, /dev/shm, it is the quickest), PORT the first server's port, VLLM the program `vllm`, which may lie
# in another environment, VLLM_OPTIONS are further options of it, such as "--max-model-len 2048". A server writes
# server-PORT.log. Ctrl-C stops the training, which writes a checkpoint; the servers end with it.
set -euo pipefail

[ $# -ge 3 ] || { echo "usage: SERVER_GPUS=0 TRAINER_GPUS=1 $0 POLICY VERB CONFIG [key=value ...]" >&2; exit 2; }
policy=$1
shift
IFS=, read -ra gpus <<< "${SERVER_GPUS:?GPUs of the servers, such as 0,1}"
IFS=, read -ra trainers <<< "${TRAINER_GPUS:?GPUs of the training, such as 2,3}"
read -ra options <<< "${VLLM_OPTIONS:-}"
if [ -n "${LORA_RANK:-}" ]; then
  export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
  options+=(--enable-lora --max-lora-rank "$LORA_RANK")
else
  export VLLM_SERVER_DEV_MODE=1
fi

started=() urls=()
trap 'kill "${started[@]}" 2>/dev/null || true' EXIT
for number in "${!gpus[@]}"; do
  port=$((${PORT:-8000} + number))
  # A session of its own: Ctrl-C is for the training.
  CUDA_VISIBLE_DEVICES=${gpus[number]} setsid "${VLLM:-vllm}" serve "$policy" --host 127.0.0.1 --port "$port" \
    --enable-scale-out --logprobs-mode processed_logprobs "${options[@]}" > "server-$port.log" 2>&1 &
  started+=($!) urls+=("http://127.0.0.1:$port")
done
for number in "${!urls[@]}"; do
  until curl --silent --fail --output /dev/null "${urls[number]}/health"; do
    kill -0 "${started[number]}" 2>/dev/null || { echo "the server ${urls[number]} has ended; see its log" >&2; exit 1; }
    sleep 2
  done
done
# torchrun ends processes that have not stopped in this time after a signal; the update and the checkpoint need it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
CUDA_VISIBLE_DEVICES=$TRAINER_GPUS python -m alignment "$@" "servers.urls=[$(IFS=,; echo "${urls[*]}")]" \
  "servers.weights_folder=${WEIGHTS:-runs/weights}" --gpus "${#trainers[@]}" ${LAUNCH:+--launch "$LAUNCH"}
