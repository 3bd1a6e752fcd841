"""How many GPUs should generate? Simulates asynchronous training on each split of the GPUs.

    python -m verl.planning.async_simulation --gpus 8 --decode 1:60,32:1500,256:6000 --update-seconds 200

Lengths and tool calls depend on the seed alone, so that the splits are compared on the same samples.
"""

import argparse
import math
from dataclasses import replace

from rich.console import Console
from rich.table import Table as Rows

from verl.planning.async_run import Outcome, Rates, Schedule, Spread, Table, Workload, simulate


def splits(
    rates: Rates, workload: Workload, schedule: Schedule, gpus: int, gpus_per_server: int = 1, updates: int = 40,
    seed: int = 0,
) -> list[Outcome]:
    """A run on each split of the GPUs, the one with most updates per hour first.

    The ranks that train share the samples of an update evenly; each server has `gpus_per_server`. GPUs may be left
    over. Raises ValueError where no split is possible.
    """
    samples = workload.prompts * workload.n
    choices: dict[int, int] = {}  # servers -> most ranks that the other GPUs permit
    for ranks in range(1, gpus):
        if samples % ranks == 0 and (servers := (gpus - ranks) // gpus_per_server):
            choices[servers] = ranks
    if not choices:
        raise ValueError(f"{gpus} GPUs are too few for a rank that trains and a server on {gpus_per_server}.")
    outcomes = [
        simulate(rates, workload, schedule, ranks, servers, updates, seed) for servers, ranks in choices.items()
    ]
    return sorted(outcomes, key=lambda outcome: -outcome.steps_per_hour)


def synchronous(
    rates: Rates, workload: Workload, schedule: Schedule, gpus: int, gpus_per_server: int = 1, updates: int = 40,
    seed: int = 0,
) -> Outcome:
    """A synchronous run in which all GPUs generate, then train, then sync."""
    schedule = replace(schedule, sync_step=1, staleness_threshold=0.0)
    ranks = max(r for r in range(1, gpus + 1) if workload.prompts * workload.n % r == 0)
    return simulate(rates, workload, schedule, ranks, max(1, gpus // gpus_per_server), updates, seed)


def print_splits(console: Console, asynchronous: list[Outcome], in_turn: Outcome) -> None:
    """A table of the runs; `in_turn` is the synchronous one. Then the best split and what its samples are like."""
    rows = Rows()
    for name in ("ranks that train", "servers", "updates per hour", "trainer idle", "servers idle", "in syncs",
                 "oldest token, updates behind"):  # fmt: skip
        rows.add_column(name, justify="right")
    for run in (*asynchronous, in_turn):
        split = (f"{run.ranks}", f"{run.servers}") if run is not in_turn else (f"all {run.ranks}", f"all {run.servers}")
        shares = (f"{share:.0%}" for share in (run.train_idle, run.generate_idle, run.sync))
        samples = sum(run.staleness.values())
        mean = sum(age * count for age, count in run.staleness.items()) / samples
        behind = f"mean {mean:.2f}, most {max(run.staleness)}"
        rows.add_row(*split, f"{run.steps_per_hour:,.1f}", *shares, behind)
    console.print(rows)
    best = asynchronous[0]
    gain = best.steps_per_hour / in_turn.steps_per_hour
    partial = sum(count for span, count in best.spans.items() if span) / sum(best.spans.values())
    console.print(
        f"Most updates with ranks that train: {best.ranks}, servers: {best.servers}; {gain:.2f} times those of "
        f"synchronous training on all GPUs. {partial:.0%} of the samples have tokens of several weights versions."
    )


def _table(text: str) -> Table:
    pairs = sorted(tuple(map(float, pair.split(":"))) for pair in text.split(","))
    if any(len(pair) != 2 or min(pair) <= 0 for pair in pairs):
        raise ValueError
    return tuple(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl.planning.async_simulation", description="How many GPUs should generate?",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--gpus", type=int, default=8, help="GPUs in all")
    add("--gpus-per-server", type=int, default=1, help="GPUs of one rollout server")
    add("--decode", type=_table, required=True, metavar="N:RATE,...",
        help="tokens per second that a server generates while it runs N sequences")  # fmt: skip
    add("--prefill", type=float, default=math.inf, help="tokens per second that a server reads")
    add("--update-seconds", type=float, required=True,
        help="seconds of an update on one rank, with all that belongs to it; ranks share them evenly")  # fmt: skip
    add("--update-fixed-seconds", type=float, default=0.0, help="seconds of an update that ranks do not share")
    add("--sync-seconds", type=float, default=0.0, help="seconds of a weight sync")
    add("--prompts", type=int, default=64, help="prompts of an update: require_batches x ppo_mini_batch_size")
    add("--n", type=int, default=8, help="samples of each prompt")
    add("--prompt-tokens", type=int, default=256, help="tokens of a prompt")
    add("--response-tokens", type=float, default=1000.0, help="mean tokens of a response (log-normal)")
    add("--response-cv", type=float, default=0.7, help="standard deviation of their number over the mean")
    add("--response-longest", type=float, default=math.inf, help="largest number of them")
    add("--turns", type=int, default=1, help="turns of the model in a sample, with a tool call between two of them")
    add("--tool-seconds", type=float, default=0.0, help="mean seconds of a tool call (log-normal)")
    add("--tool-cv", type=float, default=0.0, help="standard deviation of the seconds over the mean")
    add("--tool-tokens", type=int, default=0, help="tokens of a tool's result")
    add("--sync-step", type=int, default=4, help="async_training.trigger_parameter_sync_step")
    add("--staleness-threshold", type=float, default=0.1, help="async_training.staleness_threshold")
    add("--no-partial-rollout", action="store_true", help="async_training.partial_rollout=false")
    add("--concurrency", type=int, default=256, help="sequences that a server runs at once")
    add("--updates", type=int, default=40, help="updates that are simulated for each split")
    add("--seed", type=int, default=0, help="seed of lengths and of tool calls")
    args = parser.parse_args()
    rates = Rates(args.decode, ((1, args.prefill),), args.update_seconds, args.update_fixed_seconds, args.sync_seconds)
    workload = Workload(
        args.prompts, args.n, Spread(args.response_tokens, args.response_cv, args.response_longest),
        args.prompt_tokens, args.turns, Spread(args.tool_seconds, args.tool_cv), args.tool_tokens,
    )  # fmt: skip
    schedule = Schedule(args.sync_step, args.staleness_threshold, not args.no_partial_rollout, args.concurrency)
    run = (rates, workload, schedule, args.gpus, args.gpus_per_server, args.updates, args.seed)
    try:
        print_splits(Console(soft_wrap=True), splits(*run), synchronous(*run))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
