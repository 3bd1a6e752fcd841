"""Metrics of a validation with several samples per prompt: means, best and majority of k."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

N_BOOTSTRAP = 1000


def bootstrap_metric(
    data: list[Any], subset_size: int, reduce_fns: list[Callable[[np.ndarray], float]], n_bootstrap: int = N_BOOTSTRAP,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, std) of each statistic over `n_bootstrap` resamples [subset_size] of the data [n], with replacement."""
    if not data:
        raise ValueError("bootstrap_metric needs at least one entry in `data`.")
    draws = _draws(len(data), subset_size, n_bootstrap, seed)
    entries = np.array(data, dtype=object if isinstance(data[0], dict) else None)
    results = [[fn(entries[draw]) for draw in draws] for fn in reduce_fns]
    return [(float(np.mean(values)), float(np.std(values))) for values in results]


@functools.lru_cache(maxsize=64)
def _draws(size: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """Positions of the resamples: [n_bootstrap, subset_size], each below `size`."""
    return np.random.default_rng(seed).integers(size, size=(n_bootstrap, subset_size))


def calc_maj_val(data: list[dict[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the most frequent vote (of its first entry; the earlier vote of equals)."""
    votes = Counter(entry[vote_key] for entry in data)  # in order of appearance, which decides a tie
    winner = max(votes, key=votes.__getitem__)
    return next(entry[val_key] for entry in data if entry[vote_key] == winner)


def process_validation_metrics(
    data_sources: list[str], sample_uids: list[str], infos_dict: dict[str, list[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """{data source: {variable: {metric: mean over prompts}}} of validation samples.

    For a prompt with N samples: mean@N, and with N > 1 also std@N, best@k and worst@k (k = 2, 4, ..., N; mean and
    std over 1000 bootstrap resamples of k samples), and maj@k where `infos_dict` holds `pred`. Text variables are
    no metrics; samples without a value (None) are left out of their variable.
    """
    for variable, values in infos_dict.items():
        if len(values) != len(sample_uids):
            raise ValueError(f"validation variable {variable!r}: {len(values)} values for {len(sample_uids)} samples.")
    results: dict[str, dict[str, dict[str, float]]] = {source: {} for source in data_sources}
    preds = infos_dict.get("pred")
    for variable, values in infos_dict.items():
        prompts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, value in enumerate(values):
            if isinstance(value, Number | np.bool_):
                prompts[data_sources[row]][sample_uids[row]].append(row)
        for source, groups in prompts.items():
            columns: dict[str, list[float]] = defaultdict(list)
            for rows in groups.values():
                votes = None if preds is None else [str(preds[row]) for row in rows]
                for name, value in _prompt_metrics(np.array([float(values[row]) for row in rows]), votes, seed).items():
                    columns[name].append(value)
            results[source][variable] = {name: float(np.mean(column)) for name, column in columns.items()}
    return results


def _prompt_metrics(values: np.ndarray, votes: list[str] | None, seed: int) -> dict[str, float]:
    """Each metric of a prompt's samples: values [n], and their votes. All prompts share the resamples."""
    n = len(values)
    metrics = {f"mean@{n}": values.mean()}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = values.std()
    numbers = None if votes is None else np.array([votes.index(vote) for vote in votes])  # equal ones for equal votes
    powers = (2**exponent for exponent in range(1, n.bit_length()))
    for k in [*(k for k in powers if k < n), n]:
        draws = _draws(n, k, N_BOOTSTRAP, seed)  # [S, k]
        drawn = values[draws]
        statistics = {"best": drawn.max(1), "worst": drawn.min(1)}
        if numbers is not None:
            resamples = np.arange(len(draws))
            slots = numbers[draws] + n * resamples[:, None]
            counts = np.bincount(slots.ravel(), minlength=n * len(draws))[slots]  # [S, k]: how often a vote was drawn
            statistics["maj"] = drawn[resamples, counts.argmax(1)]
        for name, resampled in statistics.items():
            metrics |= {f"{name}@{k}/mean": resampled.mean(), f"{name}@{k}/std": resampled.std()}
    return metrics
