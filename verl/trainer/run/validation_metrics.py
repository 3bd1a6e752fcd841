"""Metrics of a validation with several samples per prompt: mean, best, worst and majority of k samples.

Runs call `process_validation_metrics`; `bootstrap_metric` and `calc_maj_val` are single statistics under verl's names.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

N_BOOTSTRAP = 1000


def process_validation_metrics(
    data_sources: list[str], sample_uids: list[str], infos_dict: dict[str, list[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """{data source: {variable: {metric: mean over prompts}}} of validation samples, one entry of each list per sample.

    For a prompt with N samples: mean@N, and with N > 1 also std@N, and for k = 2, 4, 8, ... below N and k = N: best@k
    and worst@k (/mean and /std over N_BOOTSTRAP resamples of k samples), and maj@k where `infos_dict` has `pred`, the
    answer that a sample votes for. Variables that are text are left out. A sample whose value is None does not count
    for that variable, so that N may be smaller there.
    """
    for variable, values in infos_dict.items():
        if len(values) != len(sample_uids):
            raise ValueError(f"validation variable {variable!r}: {len(values)} values for {len(sample_uids)} samples.")
    results: dict[str, dict[str, dict[str, float]]] = {source: {} for source in data_sources}
    preds = infos_dict.get("pred")
    for variable, values in infos_dict.items():
        # data source -> uid of a prompt -> its rows that have a value
        rows_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, value in enumerate(values):
            if isinstance(value, Number | np.bool_):
                rows_of[data_sources[row]][sample_uids[row]].append(row)
        for source, groups in rows_of.items():
            columns: dict[str, list[float]] = defaultdict(list)
            for rows in groups.values():
                votes = None if preds is None else [str(preds[row]) for row in rows]
                numbers = np.array([float(values[row]) for row in rows])
                for name, value in _prompt_metrics(numbers, votes, seed).items():
                    columns[name].append(value)
            results[source][variable] = {name: float(np.mean(column)) for name, column in columns.items()}
    return results


def _prompt_metrics(values: np.ndarray, votes: list[str] | None, seed: int) -> dict[str, float]:
    """{metric: value} of one prompt's samples: values [n], and the answer that each votes for.

    The resamples depend on the sizes and the seed only: all prompts with n samples share them.
    """
    n = len(values)
    metrics = {f"mean@{n}": values.mean()}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = values.std()
    vote_numbers = None if votes is None else np.array([votes.index(vote) for vote in votes])  # equal for equal votes
    powers = [2**e for e in range(1, n.bit_length()) if 2**e < n]
    for k in [*powers, n]:
        draws = _draws(n, k, N_BOOTSTRAP, seed)  # [S, k], S = N_BOOTSTRAP
        drawn = values[draws]
        statistics = {"best": drawn.max(1), "worst": drawn.min(1)}
        if vote_numbers is not None:
            # Votes of all resamples are counted at once: those of resample s in the slots from s * n on.
            resamples = np.arange(len(draws))
            slots = vote_numbers[draws] + n * resamples[:, None]
            counts = np.bincount(slots.ravel(), minlength=n * len(draws))[slots]  # [S, k]: how often the vote was drawn
            statistics["maj"] = drawn[resamples, counts.argmax(1)]  # the first of equals
        for name, resampled in statistics.items():
            metrics |= {f"{name}@{k}/mean": resampled.mean(), f"{name}@{k}/std": resampled.std()}
    return metrics


@functools.lru_cache(maxsize=64)
def _draws(size: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """Positions of the resamples: [n_bootstrap, subset_size], each below `size`."""
    return np.random.default_rng(seed).integers(size, size=(n_bootstrap, subset_size))


def bootstrap_metric(
    data: list[Any], subset_size: int, reduce_fns: list[Callable[[np.ndarray], float]], n_bootstrap: int = N_BOOTSTRAP,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, std) of each of `reduce_fns` over `n_bootstrap` resamples of `subset_size` entries of `data`, drawn with
    replacement; each function gets an array [subset_size]. ValueError without data.
    """
    if not data:
        raise ValueError("bootstrap_metric needs at least one entry in `data`.")
    draws = _draws(len(data), subset_size, n_bootstrap, seed)
    entries = np.array(data, dtype=object if isinstance(data[0], dict) else None)
    results = [[fn(entries[draw]) for draw in draws] for fn in reduce_fns]
    return [(float(np.mean(values)), float(np.std(values))) for values in results]


def calc_maj_val(data: list[dict[str, Any]], vote_key: str, val_key: str) -> float:
    """`val_key` of the first entry with the most frequent `vote_key`; of equals the one that comes first."""
    votes = Counter(entry[vote_key] for entry in data)  # in order of appearance, which decides a tie
    winner = max(votes, key=votes.__getitem__)
    return next(entry[val_key] for entry in data if entry[vote_key] == winner)
