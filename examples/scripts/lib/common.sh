# What the training scripts share: `train MODULE key=value ...`, from the repository's root; later settings win.
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

train() {
    python -m "$1" \
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
        "${@:2}"
}
