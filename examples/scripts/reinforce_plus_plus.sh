#!/usr/bin/env bash
# REINFORCE++: returns of all tokens, whitened over the batch.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/reinforce_plus_plus.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train verl.trainer.main_ppo \
    algorithm.adv_estimator=reinforce_plus_plus \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    algorithm.use_kl_in_reward=true \
    "$@"
