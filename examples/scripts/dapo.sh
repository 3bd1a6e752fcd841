#!/usr/bin/env bash
# DAPO: groups that teach nothing are replaced by new ones, the clip is wider above, overlong answers lose points.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/dapo.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train recipe.dapo.main_dapo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=16 \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.gen_batch_size=768 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=256 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    "$@"
