"""The metrics of the recipe, for the documentation and the report."""

from verl.report.metric_names import LeftOut, RecipeMetrics

METRICS = RecipeMetrics(
    meanings={
        "actor/refine_loss": "Cross-entropy of the refinement loss per label and round (actor.auxiliary_losses).",
        "rollout/forwards": "Rollout refine: forwards of the step's batch on one rank.",
        "train/loss_s*": "Iterative refinement: the loss of a round, from 0 on, over the positions that it counts.",
        "train/loss_ar": "Iterative refinement: the next-token loss of the clean text.",
        "train/loss_total": "Iterative refinement: the weighted sum of the rounds' losses and the clean text's.",
        "train/noise_mean": "Iterative refinement: noise tokens over the positions that a round's loss counts.",
        "train/skipped_rows": "Iterative refinement: share of the rows that data.bad_rows=skip left out, or whose own "
        "answers were not kept, if there are any.",
        "val/loss_*": "The same four over the validation set, whose noise is the same each time.",
        "val/noise_mean": "The same as in training.",
    },
    headlines=(
        ("Refinement", "loss of each round, of the clean text, and their weighted sum", ("train/loss_",)),
    ),
    left_out=(
        LeftOut("train/skipped_rows", "of the rows were left out (data.bad_rows, iterative.self_generate)"),
    ),
)
