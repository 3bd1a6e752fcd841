"""What a worker of the test bed does with vLLM: the same answers and blocks as hf_tasks, from two engines.

vLLM batches requests by itself and shares prefixes, but has no forward that verifies a draft: `_read` takes the
predictions along a text from its prompt log-probs. The path of exact match is the target's own text, so that the blocks
on it follow from one reading by the draft, without a round for each block.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from examples.spd_arithmetic.pair import EXACT, PairFiles, end_tokens

if TYPE_CHECKING:
    from vllm import LLM

ENGINE_CACHE_BYTES = 256 << 20  # of each engine, which zeroes it when it starts


@cache
def _engines(files: PairFiles) -> dict[str, LLM]:
    """The engines of target and draft, once per process."""
    from verl.rollout.vllm_rollout.vllm_rollout import start_engine

    on_cuda = files.device != "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(files.threads))
    length = files.longest + 2 * files.max_new_tokens + 2 * files.gamma + 2  # a context, a completion, a draft
    engines = {}
    for role, share in zip(("target", "draft"), files.memory_shares, strict=True):
        limit = AutoConfig.from_pretrained(files.folder / role).get_text_config().max_position_embeddings
        arguments: dict[str, Any] = {
            "model": str(files.folder / role), "dtype": files.dtype, "skip_tokenizer_init": True, "seed": 0,
            "generation_config": "vllm", "max_model_len": min(length, limit), "enable_prefix_caching": True,
            "disable_log_stats": True,
        }  # fmt: skip
        if on_cuda:
            arguments |= {"gpu_memory_utilization": share}
        else:
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": ENGINE_CACHE_BYTES,
                          "block_size": 32}  # the usual 128 tokens are more than a prefix to share
        if role == "target" and files.tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": files.tensor_parallel, "distributed_executor_backend": "mp"}
        engines[role] = start_engine(arguments, on_cuda)
    return engines


def complete(files: PairFiles, role: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy continuation of each prompt by `target` or `draft`, its end token included."""
    return _greedy(files, role, prompts, [files.max_new_tokens] * len(prompts))


def decode(files: PairFiles, margin: float, rows: Sequence[tuple[list[int], int]]) -> dict[str, list]:
    """As hf_tasks.decode, except that blocks with margin EXACT hold draft and target up to the first mismatch only."""
    prompts, offsets = zip(*rows, strict=True)
    if margin == EXACT:
        return _own_paths(files, prompts, offsets)
    ends, count = end_tokens(files.folder), len(rows)
    begun = _greedy(files, "target", prompts, offsets)
    texts = [[] if ends.intersection(ids) else ids for ids in begun]  # a shorter answer is decoded from its beginning
    limits = [len(ids) + files.max_new_tokens for ids in texts]
    rounds, accepted, blocks, running = [0] * count, [0] * count, [], list(range(count))
    while running:
        contexts = [prompts[row] + texts[row] for row in running]
        drafts = _greedy(files, "draft", contexts, [files.gamma] * len(running))
        read = _read(files, "target", list(zip(contexts, drafts, strict=True)))
        for row, draft, (target, gaps) in zip(running, drafts, read, strict=True):
            wrong = [d != t for d, t in zip(draft, target, strict=False)]
            if any(wrong):
                blocks.append((row, len(texts[row]), draft, target))
            rejected = (i for i, w in enumerate(wrong) if w and gaps[i] > margin)
            passed = next(rejected, len(draft))
            tokens = _up_to_end([*draft[:passed], target[passed]], ends)[: limits[row] - len(texts[row])]
            texts[row] = texts[row] + tokens
            rounds[row] += 1
            accepted[row] += min(passed, len(tokens))
        running = [row for row in running if texts[row][-1] not in ends and len(texts[row]) < limits[row]]
    return {"tokens": texts, "rounds": rounds, "accepted": accepted, "blocks": blocks}


def complete_blocks(
    files: PairFiles, blocks: Sequence[tuple[list[int], list[int], list[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Draft and target ids of (context, draft, target) that `decode` recorded with margin EXACT."""
    ends = end_tokens(files.folder)
    missing = [0 if draft[-1] in ends else files.gamma - len(draft) for _, draft, _ in blocks]
    more = _greedy(files, "draft", [context + draft for context, draft, _ in blocks], missing)
    texts = [(context, draft + added) for (context, draft, _), added in zip(blocks, more, strict=True)]
    read = _read(files, "target", texts)
    return [(draft, target) for (_, draft), (target, _) in zip(texts, read, strict=True)]


def _own_paths(files: PairFiles, prompts: Sequence[list[int]], offsets: Sequence[int]) -> dict[str, list]:
    """`decode` by exact match."""
    ends, gamma = end_tokens(files.folder), files.gamma
    # The last block may reach over the limit, which counts from the first block.
    limits = [offset + files.max_new_tokens for offset in offsets]
    own = _greedy(files, "target", prompts, [limit + gamma + 1 for limit in limits])
    heard = _read(files, "draft", list(zip(prompts, own, strict=True)))
    tokens, rounds, accepted, blocks = [], [], [], []
    for row, (text, (chosen, _), offset) in enumerate(zip(own, heard, offsets, strict=True)):
        start = 0 if ends.intersection(text[:offset]) else offset
        answer = text[: start + files.max_new_tokens]
        rounds.append(0)
        accepted.append(0)
        while start < len(answer):
            ahead = text[start : start + gamma]
            matched = next((i for i, t in enumerate(ahead) if chosen[start + i] != t), len(ahead))
            if matched < len(ahead):
                upto = start + matched
                blocks.append((row, start, [*text[start:upto], chosen[upto]], text[start : upto + 1]))
            taken = min(matched + 1, len(answer) - start)
            rounds[-1] += 1
            accepted[-1] += min(matched, taken)
            start += taken
        tokens.append(answer)
    return {"tokens": tokens, "rounds": rounds, "accepted": accepted, "blocks": blocks}


def _greedy(files: PairFiles, role: str, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
    """Greedy continuation of each prompt by at most so many tokens, an end token included."""
    from vllm import SamplingParams

    stops = sorted(end_tokens(files.folder))
    asked = [k for k, limit in enumerate(limits) if limit > 0]
    params = {n: SamplingParams(temperature=0.0, max_tokens=n, stop_token_ids=stops, detokenize=False)
              for n in {limits[k] for k in asked}}
    done = _generate(files, role, [prompts[k] for k in asked], [params[limits[k]] for k in asked])
    continued: list[list[int]] = [[] for _ in prompts]
    for k, output in zip(asked, done, strict=True):
        continued[k] = list(output.outputs[0].token_ids)
    return continued


def _read(
    files: PairFiles, role: str, texts: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[list[int], list[float]]]:
    """Of each (context, text) the model's predictions of text[0], ..., text[-1] and of the token after it, and by how
    much the logit of each prediction exceeds that of the text's token (for all but the last).
    """
    from vllm import SamplingParams

    def ask(which: Sequence[int], from_cache: bool) -> list[Any]:
        # Prompt log-probs hold, for each token, its own one and the most likely token's; the last prediction is
        # generated. Of tokens that come from the prefix cache there are none, or no valid ones.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, flat_logprobs=True, detokenize=False,
                                skip_reading_prefix_cache=not from_cache)
        return _generate(files, role, [texts[k][0] + texts[k][1] for k in which], params)

    done = ask(range(len(texts)), True)
    over = [k for k, (context, _) in enumerate(texts) if done[k].num_cached_tokens >= len(context)]
    for k, output in zip(over, ask(over, False), strict=True):
        done[k] = output
    results = []
    for (_, text), output in zip(texts, done, strict=True):
        values = output.prompt_logprobs
        places = values.start_indices[len(values.start_indices) - len(text) :]
        predicted = [values.token_ids[i + 1] for i in places]
        gaps = [values.logprobs[i + 1] - values.logprobs[i] for i in places]
        results.append(([*predicted, output.outputs[0].token_ids[0]], gaps))
    return results


def _generate(files: PairFiles, role: str, prompts: Sequence[list[int]], params: Any) -> list[Any]:
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    return _engines(files)[role].generate(inputs, params, use_tqdm=False) if inputs else []


def _up_to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """The ids up to the first end token."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]
