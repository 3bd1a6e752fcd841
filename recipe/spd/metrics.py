"""The metrics of the recipe, for the documentation and the report."""

from verl.report.metric_names import LeftOut, RecipeMetrics

METRICS = RecipeMetrics(
    meanings={
        "spd/accepted_len/*": "Draft tokens accepted of a block.",
        "spd/scenario/*": "Share of samples by scenario of the SPD reward: A, B, C, D, zero.",
        "spd/completions/*": "Completions of hybrid contexts: requested, computed, read from the store, failed.",
        "spd/completions/hit_rate": "Share of the requested completions that the store had.",
        "spd/store/mib": "Size of the completion store's file, MiB.",
        "spd/drift/*": "actor/logprob_drift of accept/reject decisions.",
        "spd/dropped_samples": "Samples whose completion failed.",
        "spd/hit_limit": "Share of answers cut at the token limit.",
        "spd/baseline/truncated": "Share of samples whose answer by the target alone is cut there (`spd.truncated`).",
        "spd/baseline/changed": "Share of samples whose baseline by the run's server differs from that of the data.",
        "spd/unlabelled_blocks": "Share of the supervised training's blocks that have no label.",
        "spd/unlabelled_val_blocks": "The same of its validation.",
        "spd/output_length_ratio": "Length of the answer after a hybrid context over the target's own.",
    },
    headlines=(
        ("Accepted length", "leading accepted draft tokens of a judged block", ("spd/accepted_len/mean",)),
        ("Scenario shares", "A sped up, B broke, C useless, D repaired, zero: nothing accepted", ("spd/scenario/",)),
        ("Output length ratio", "hybrid completion over the baseline completion", ("spd/output_length_ratio",)),
        ("Drift of decisions", "log-prob now against at sampling", ("spd/drift/",)),
        ("Completions", "requested, computed by a server, read from the store, failed", ("spd/completions/",)),
    ),
    trends={"spd/accepted_len/mean": "accepted length"},
    counters={"spd/dropped_samples": "lost completions' samples", "spd/completions/failed": "failed completions"},
    flags=("scenario_",),
    left_out=(
        LeftOut("spd/hit_limit", "of the answers after a hybrid context were cut at the token limit"),
        LeftOut("spd/baseline/truncated", "of the samples have a baseline that is cut at the token limit"),
        LeftOut("spd/unlabelled_blocks", "of the training blocks have no label"),
        LeftOut("spd/unlabelled_val_blocks", "of the validation blocks have no label"),
    ),
)
