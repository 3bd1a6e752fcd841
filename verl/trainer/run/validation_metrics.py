"""Metrics of a validation with several samples per prompt: means, best and majority of k."""

from collections import Counter, defaultdict
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

N_BOOTSTRAP = 1000
# Elements [prompts, resamples, k] handled at a time: bounds the memory, stays in the cache.
_CHUNK = 2_000_000


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
    results: dict[str, dict[str, dict[str, float]]] = {}
    sources = np.asarray(data_sources, dtype=object)
    for source in dict.fromkeys(data_sources):
        rows = np.flatnonzero(sources == source)
        results[source] = {}
        for variable, values in infos_dict.items():
            present = [row for row in rows if isinstance(values[row], Number | np.bool_)]
            if present:
                per_prompt = _prompt_metrics(present, sample_uids, values, infos_dict.get("pred"), seed)
                results[source][variable] = {name: float(np.mean(column)) for name, column in per_prompt.items()}
    return results


def _prompt_metrics(
    rows: list[int], sample_uids: list[str], values: list[Any], preds: list[Any] | None, seed: int
) -> dict[str, np.ndarray]:
    """Each metric's value for every prompt that has it."""
    prompts: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        prompts[sample_uids[row]].append(row)
    by_size: dict[int, list[list[int]]] = defaultdict(list)
    for members in prompts.values():
        by_size[len(members)].append(members)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    for size, groups in sorted(by_size.items()):
        table = np.array([[float(values[row]) for row in members] for members in groups])  # [prompts, size]
        columns[f"mean@{size}"].append(table.mean(1))
        if size == 1:
            continue
        columns[f"std@{size}"].append(table.std(1))
        votes = None
        if preds is not None:  # equal votes of a prompt get equal numbers below its number of samples
            texts = ([str(preds[row]) for row in members] for members in groups)
            votes = np.array([[members.index(text) for text in members] for members in texts])  # [prompts, size]
        powers = (2**exponent for exponent in range(1, size.bit_length()))
        for k in [*(k for k in powers if k < size), size]:
            for name, column in _bootstrap_table(table, votes, k, seed).items():
                columns[name].append(column)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _bootstrap_table(table: np.ndarray, votes: np.ndarray | None, k: int, seed: int) -> dict[str, np.ndarray]:
    """best@k, worst@k, maj@k (mean and std over resamples) of each prompt: table, votes [prompts, size] -> [prompts].

    All prompts share the resamples, as they would with one seed each.
    """
    draws = _draws(table.shape[1], k, N_BOOTSTRAP, seed)  # [S, k]
    step = max(1, _CHUNK // draws.size)
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for start in range(0, len(table), step):
        chunk = table[start : start + step]
        drawn = chunk[:, draws]  # [p, S, k]
        statistics = {"best": drawn.max(-1), "worst": drawn.min(-1)}
        if votes is not None:
            statistics["maj"] = _majority_values(chunk, votes[start : start + step], draws)
        for name, resampled in statistics.items():
            parts[f"{name}@{k}/mean"].append(resampled.mean(1))
            parts[f"{name}@{k}/std"].append(resampled.std(1))
    return {name: np.concatenate(columns) for name, columns in parts.items()}


def _majority_values(table: np.ndarray, votes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Value of the most frequent vote in each resample: table, votes [p, size], draws [S, k] -> [p, S].

    An entry weighs as often as its vote was drawn; the first entry of the largest weight is the winner's first one.
    """
    prompts, size = table.shape
    resamples = len(draws)
    slots = votes[:, draws] + size * np.arange(resamples)[:, None]  # [p, S, k], one block of slots a resample
    slots += (size * resamples * np.arange(prompts))[:, None, None]
    counts = np.bincount(slots.ravel(), minlength=prompts * resamples * size)
    first = counts[slots].argmax(-1)  # [p, S]
    winners = draws[np.arange(resamples), first]  # [p, S]
    return np.take_along_axis(table, winners, axis=1)
