"""200 seeded mutations of blocks, metadata and prepared rows: read right, or refused by one sentence.

The files have page checksums. A file without them may hold another valid token id after a flipped bit; nobody can tell.
"""

import random
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

import train_spd_scorer as entry
from recipe.spd.data.dataset import SPDRLHFDataset
from recipe.spd.rollout.answers import normalise
from tests.helpers.models import make_tokenizer
from tests.spd.test_bad_input import block_rows, metadata_rows, write
from verl.data.rl_dataset import DatasetError

COUNTS = {"blocks": 70, "metadata": 50, "train": 80}
LIMITS = OmegaConf.create({"max_prompt_length": 20, "max_response_length": 4, "shuffle": False, "seed": None})


# ---- bytes: data -> data ---------------------------------------------------------------------------------------


def flip_bits(data, rng):
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 4, 16])):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut_off(data, rng):
    return data[: rng.randrange(len(data))]


def blank_a_piece(data, rng):
    first = rng.randrange(len(data))
    return data[:first] + bytes(min(40, len(data) - first)) + data[first + 40 :]


def double_a_piece(data, rng):
    first = rng.randrange(len(data))
    return data[:first] + data[first : first + 16] + data[first:]


BYTES = [flip_bits, flip_bits, flip_bits, cut_off, blank_a_piece, double_a_piece]


# ---- columns: (parent, name, rng) alters a column of every row, parent being a row or a struct in it -------------


def drop(parents, name, rng):
    for parent in parents:
        del parent[name]


def null_in_one_row(parents, name, rng):
    rng.choice(parents)[name] = None


def each(change):
    """A mutation of every value by `change(value)`."""

    def mutate(parents, name, rng):
        for parent in parents:
            parent[name] = change(parent[name])

    return mutate


def as_floats(value):
    if isinstance(value, list):
        return [float(v) for v in value]
    return 0.5 if isinstance(value, str) and not value.isdecimal() else float(value)


# A text stays: another text could be as good a truth, which no reader can tell.
def huge(value):
    return [*value[:-1], 2**40] if isinstance(value, list) else value if isinstance(value, str) else 2**40


def negative(value):
    return [-1, *value[1:]] if isinstance(value, list) else value if isinstance(value, str) else -1


COLUMNS = {
    "drop": drop, "null_in_one_row": null_in_one_row, "as_floats": each(as_floats), "as_text": each(str),
    "as_bytes": each(lambda value: str(value).encode()), "in_a_list": each(lambda value: [value]),
    "in_a_struct": each(lambda value: {"value": value}), "huge": each(huge), "negative": each(negative),
    "emptied": each(lambda value: [] if isinstance(value, list) else ""),
    "with_null_inside": each(lambda value: [*value[:-1], None] if isinstance(value, list) else None),
}
OF_STRUCTS = ("drop", "null_in_one_row", "as_text", "as_bytes", "in_a_list")


def mutate_column(path, out, rng):
    """Rewrite the rows of `path` with one column altered; gives (column, mutation)."""
    rows = pq.read_table(path).to_pylist()
    name = rng.choice(sorted(rows[0]))
    parents = rows
    if isinstance(rows[0][name], dict) and rng.random() < 0.9:
        parents = [row[name] for row in rows]
        name = rng.choice(sorted(parents[0]))
    mutation = rng.choice(OF_STRUCTS if isinstance(parents[0][name], dict) else [*COLUMNS])
    COLUMNS[mutation](parents, name, rng)
    write(out, rows)
    return f"{name} {mutation}"


def mutate(path, out, rng):
    """One mutated copy of `path` in `out`, which is parquet in name at least; gives what was done."""
    if rng.random() < 0.5:
        mutation = rng.choice(BYTES)
        out.write_bytes(mutation(path.read_bytes(), rng))
        return mutation.__name__
    return mutate_column(path, out, rng)


# ---- what is read ----------------------------------------------------------------------------------------------

# Not compared: `prompt`, `index`, `question_id` (for people), `style`, `data_source` (asked for by the trainer).
FACTS = ("context_ids", "draft_ids", "target_ids", "is_correct_baseline")


def facts_of(dataset):
    """What training uses of each row. The length of the baseline may be unknown, never another."""
    return [
        {
            **{name: item["extra_info"][name] for name in FACTS}, "ids": item["input_ids"].tolist(),
            "layout": item["spd_layout"].tolist(), "truth": normalise(item["reward_model"]["ground_truth"]),
        }
        for item in (dataset[i] for i in range(len(dataset)))
    ]  # fmt: skip


def lengths_of(dataset):
    return [dataset[i]["extra_info"].get("baseline_length") for i in range(len(dataset))]


class Bench:
    def __init__(self, directory):
        self.directory = directory
        self.tokenizer = make_tokenizer()
        self.files = {name: directory / f"{name}.parquet" for name in COUNTS}
        write(self.files["blocks"], block_rows())
        write(self.files["metadata"], metadata_rows())
        self.prepare(self.files["blocks"], self.files["metadata"], self.files["train"])
        self.whole = self.read(self.files["train"])

    def prepare(self, blocks, metadata, out):
        return entry.prepare_spd_data_from_real_source(blocks, metadata, out, self.tokenizer)

    def read(self, path):
        return SPDRLHFDataset(str(path), self.tokenizer, LIMITS)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("mutated"))


def use(bench, kind, path, tmp_path):
    """The data set that training would read if `path` stood in place of a file of that kind."""
    if kind == "train":
        return bench.read(path)
    given = {**bench.files, kind: path}
    bench.prepare(given["blocks"], given["metadata"], tmp_path / "made.parquet")
    return bench.read(tmp_path / "made.parquet")


@pytest.mark.parametrize("kind", COUNTS)
def test_a_mutated_file_is_read_correctly_or_refused_with_one_message(bench, kind, tmp_path):
    outcomes = Counter()
    for number in range(COUNTS[kind]):
        rng = random.Random(f"{kind} {number}")
        path = tmp_path / f"{kind}_{number}.parquet"
        done = mutate(bench.files[kind], path, rng)
        case = f"{kind} {number}: {done}"
        try:
            dataset = use(bench, kind, path, tmp_path)
        except (entry.DataError, DatasetError) as refused:
            said = str(refused)
            assert str(path) in said and "\n" not in said and len(said) < 700, (case, said)
            outcomes["refused"] += 1
            continue
        assert facts_of(dataset) == facts_of(bench.whole), case
        lost = lengths_of(dataset) != lengths_of(bench.whole)
        pairs = zip(lengths_of(dataset), lengths_of(bench.whole), strict=True)
        assert all(a in (None, b) for a, b in pairs) and (not lost or "baseline_length" in done), case
        outcomes["read"] += 1
    assert outcomes["refused"] > outcomes["read"] > 0
    assert sum(outcomes.values()) == COUNTS[kind]


def test_other_integer_and_list_types_are_read_right(bench, tmp_path):
    table = pq.read_table(bench.files["blocks"])
    kinds = {"context_ids": pa.large_list(pa.int32()), "draft_ids": pa.list_(pa.uint16())}
    for name, kind in {**kinds, "target_ids": pa.list_(pa.int8())}.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table[name].cast(kind))
    pq.write_table(table, tmp_path / "typed.parquet")
    assert facts_of(use(bench, "blocks", tmp_path / "typed.parquet", tmp_path)) == facts_of(bench.whole)
