#!/usr/bin/env bash
# PPO with a critic that starts from the same model.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/ppo.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    critic.model.path="${CRITIC:-$MODEL}" \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=true \
    critic.model.use_remove_padding=true \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    "$@"
