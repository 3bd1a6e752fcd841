"""Prepares questions and answers for RL: the form of verl 0.7's data preparation scripts."""

import argparse
import os
import re

import datasets

from verl.utils.hdfs_io import copy, makedirs

INSTRUCTION = 'Think step by step and write the answer after "####".'


def answer_of(solution):
    found = re.search(r"#### (-?[0-9.,]+)", solution)
    assert found is not None
    return found.group(1).replace(",", "")


def make_map_fn(split):
    def process(example, idx):
        question, solution = example.pop("question"), example.pop("answer")
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer_of(solution)},
            "extra_info": {"split": split, "index": idx, "answer": solution, "question": question},
        }

    return process


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_dir", default=None)
    parser.add_argument("--hdfs_dir", default=None)
    parser.add_argument("--local_dataset_path", default=None)
    parser.add_argument("--local_save_dir", default="~/data/gsm8k")
    args = parser.parse_args()

    dataset = datasets.load_dataset(args.local_dataset_path or "openai/gsm8k")
    local_save_dir = os.path.expanduser(args.local_dir or args.local_save_dir)
    for split in ("train", "test"):
        rows = dataset[split].map(function=make_map_fn(split), with_indices=True)
        rows.to_parquet(os.path.join(local_save_dir, f"{split}.parquet"))

    if args.hdfs_dir is not None:
        makedirs(args.hdfs_dir)
        copy(src=local_save_dir, dst=args.hdfs_dir)
