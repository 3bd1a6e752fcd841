#!/usr/bin/env bash
# GRPO: samples of a prompt are each other's baseline; a KL term keeps near to the start.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/grpo.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.share_prompt_forward=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    "$@"
