"""Memory and time of 100,000 drafted blocks in the driver, in a process of its own: benchmarks.spd_blocks DIR."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from benchmarks.harness import Row, resident_bytes, restart_peak

BLOCKS, QUESTIONS, GAMMA, VOCABULARY = 100_000, 7_000, 8, 128_000
CONTEXT = (150, 1550)  # tokens, drawn evenly: a question of 150 and an answer of up to 1,400


class Tokenizer:
    """What preparing and reading blocks asks of a tokenizer."""

    pad_token_id, eos_token_id, sep_token_id, name_or_path = 0, 1, 2, "benchmark"

    def __len__(self) -> int:
        return VOCABULARY


def made(rng: np.random.Generator, count: int) -> Iterator[dict]:
    """Blocks whose every second token is a mismatch."""
    for _ in range(count):
        draft = rng.integers(3, VOCABULARY, GAMMA)
        target = np.append(draft, 5)
        target[::2] = rng.integers(3, VOCABULARY, GAMMA // 2 + 1)
        yield {
            "question_id": f"train-{rng.integers(QUESTIONS)}", "draft_ids": draft, "target_ids": target,
            "context_ids": rng.integers(3, VOCABULARY, rng.integers(*CONTEXT)).astype(np.int32),
            "is_correct_baseline": True, "baseline_length": 100, "question_len": 150,
        }  # fmt: skip


def measure(folder: Path) -> dict[str, float]:
    """Seconds and peak bytes of preparing the blocks, and of the data set's reading and checks."""
    from recipe.spd.data.dataset import SPDRLHFDataset
    from recipe.spd.data.prepare import prepare_spd_data_from_real_source

    rng = np.random.default_rng(0)
    blocks, metadata = folder / "blocks.parquet", folder / "metadata.parquet"
    frames = (pd.DataFrame(made(rng, 2000)) for _ in range(BLOCKS // 2000))
    write_frames(frames, blocks)
    pd.DataFrame(
        {"question_id": f"train-{i}", "question": "how many " * 30, "ground_truth": "7", "is_correct_baseline": True}
        for i in range(QUESTIONS)
    ).to_parquet(metadata)
    values: dict[str, float] = {}

    def timed(name, work):
        restart_peak()
        held, started = resident_bytes(), time.perf_counter()
        result = work()
        values[f"{name}_seconds"] = time.perf_counter() - started
        values[f"{name}_gb"] = (resident_bytes(peak=True) - held) / 1e9
        return result

    done = timed("prepare", lambda: prepare_spd_data_from_real_source(blocks, metadata, folder / "train", Tokenizer()))
    limits = {"max_prompt_length": done.longest_input, "max_response_length": GAMMA, "shuffle": False, "seed": 0}
    given = (str(folder / "train.parquet"), Tokenizer(), OmegaConf.create(limits))
    done.path.rename(given[0])
    data = timed("check", lambda: SPDRLHFDataset(*given))
    assert len(data) == BLOCKS
    return values


def write_frames(frames: Iterator[pd.DataFrame], path: Path) -> None:
    """One parquet file from several frames of the same columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = pa.Table.from_pandas(next(frames))
    with pq.ParquetWriter(path, first.schema, write_page_checksum=True) as writer:
        writer.write_table(first)
        for frame in frames:
            writer.write_table(pa.Table.from_pandas(frame, first.schema))


def run() -> list[Row]:
    """The measurements of a fresh process."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.spd_blocks", scratch]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = json.loads(output.splitlines()[-1])
    units = {
        "check_seconds": "s, the data set of 100,000 blocks read and checked", "prepare_seconds": "s, before that",
        "gb": "GB, peak of the data set above what the process held", "prepare_gb": "GB, peak of preparing",
    }  # fmt: skip
    values["gb"] = values.pop("check_gb")
    return [Row(f"blocks_100k_{name}", v := values[name], unit, v, v, 1) for name, unit in units.items()]


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
