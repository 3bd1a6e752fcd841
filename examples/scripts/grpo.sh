#!/usr/bin/env bash
# GRPO: samples of a prompt are each other's baseline; a KL term keeps near to the start.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/grpo.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.share_prompt_forward=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    data.train_files="${TRAIN:?a parquet file of prompts}" \
    data.val_files="${VAL:?a parquet file of prompts}" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:?a directory or hub name}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.name=vllm \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
