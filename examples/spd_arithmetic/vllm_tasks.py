"""What a worker of the test bed does with vLLM: the same answers and blocks as hf_tasks, from two engines.

vLLM batches requests by itself and shares prefixes, but has no forward that verifies a draft: `predictions` takes the
predictions along a text from its prompt log-probs. The path of exact match is the target's own text, so that the blocks
on it follow from one reading by the draft, without a round for each block. On another path the draft writes several
rounds ahead and the target reads them together: they hold as long as the target adds what the draft wrote there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers import AutoConfig

from examples.spd_arithmetic.pair import EXACT, PairFiles, end_tokens
from examples.spd_arithmetic.workers import report_share

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

LEAST_CACHE_BYTES = 256 << 20  # of each engine, which zeroes it when it starts
ROUNDS_AHEAD = 3  # that the draft writes before the target reads them


@cache
def _engines(files: PairFiles) -> dict[str, LLM]:
    """The engines of target and draft, once per process."""
    from verl.rollout.vllm_rollout.vllm_rollout import start_engine

    on_cuda = files.device != "cpu"
    if not on_cuda:
        os.environ["OMP_NUM_THREADS"] = str(files.threads)
        torch.set_num_threads(files.threads)
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
            # With a cache as large as the weights all rows run together, and no context is read again in each round.
            weights = sum(file.stat().st_size for file in (files.folder / role).glob("*.safetensors"))
            cache = max(LEAST_CACHE_BYTES, min(weights, psutil.virtual_memory().available // 8))
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": cache,
                          "block_size": 32}  # the usual 128 tokens are more than a prefix to share
        if role == "target" and files.tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": files.tensor_parallel, "distributed_executor_backend": "mp"}
        engines[role] = start_engine(arguments, on_cuda)
    return engines


def complete(files: PairFiles, role: str, rows: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Greedy continuation of each prompt by `target` or `draft`, its end token included, of at most so many tokens."""
    return continued(files, role, *zip(*rows, strict=True), share=1.0)


def decode(files: PairFiles, margin: float, rows: Sequence[tuple[list[int], int]]) -> dict[str, list]:
    """As hf_tasks.decode, except that blocks with margin EXACT hold draft and target up to the first mismatch only."""
    prompts, offsets = zip(*rows, strict=True)
    if margin == EXACT:
        return _own_paths(files, prompts, offsets)
    ends, count, step = end_tokens(files.folder), len(rows), files.gamma + 1
    begun = continued(files, "target", prompts, offsets)
    texts = [[] if ends.intersection(ids) else ids for ids in begun]  # a shorter answer is decoded from its beginning
    limits = [len(ids) + files.max_new_tokens for ids in texts]
    rounds, accepted, blocks, running = [0] * count, [0] * count, [], list(range(count))
    while running:
        contexts = [prompts[row] + texts[row] for row in running]
        left = [-(-(limits[row] - len(texts[row])) // step) for row in running]  # rounds, if all drafts are accepted
        drafts = continued(files, "draft", contexts, [min(ROUNDS_AHEAD, most) * step - 1 for most in left])
        read = predictions(files, "target", list(zip(contexts, drafts, strict=True)))
        for row, ahead, (predicted, gaps) in zip(running, drafts, read, strict=True):
            for at in range(0, len(ahead), step):
                draft, target = ahead[at : at + files.gamma], predicted[at : at + step]
                wrong = [d != t for d, t in zip(draft, target, strict=False)]
                if any(wrong):
                    blocks.append((row, len(texts[row]), draft, target))
                passed = next((i for i, w in enumerate(wrong) if w and gaps[at + i] > margin), len(draft))
                tokens = _up_to_end([*draft[:passed], target[passed]], ends)[: limits[row] - len(texts[row])]
                texts[row] = texts[row] + tokens
                rounds[row] += 1
                accepted[row] += min(passed, len(tokens))
                if tokens != ahead[at : at + step]:  # the draft has written the rest after other tokens
                    break
        running = [row for row in running if texts[row][-1] not in ends and len(texts[row]) < limits[row]]
        report_share(1 - sum(limits[row] - len(texts[row]) for row in running) / sum(limits))
    return {"tokens": texts, "rounds": rounds, "accepted": accepted, "blocks": blocks}


def complete_blocks(
    files: PairFiles, blocks: Sequence[tuple[list[int], list[int], list[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Draft and target ids of (context, draft, target) that `decode` recorded with margin EXACT."""
    ends = end_tokens(files.folder)
    missing = [0 if draft[-1] in ends else files.gamma - len(draft) for _, draft, _ in blocks]
    more = continued(files, "draft", [context + draft for context, draft, _ in blocks], missing)
    # Up to the mismatch the context is the target's own text, whose tokens are in the prefix cache.
    texts = [(context + draft[:-1], draft[-1:] + added)
             for (context, draft, _), added in zip(blocks, more, strict=True)]
    read = predictions(files, "target", texts)
    return [(draft + added, known[:-1] + target)
            for (_, draft, known), added, (target, _) in zip(blocks, more, read, strict=True)]


def _own_paths(files: PairFiles, prompts: Sequence[list[int]], offsets: Sequence[int]) -> dict[str, list]:
    """`decode` by exact match."""
    ends, gamma = end_tokens(files.folder), files.gamma
    # The last block may reach over the limit, which counts from the first block.
    limits = [offset + files.max_new_tokens for offset in offsets]
    own = continued(files, "target", prompts, [limit + gamma + 1 for limit in limits], share=0.8)
    continued(files, "draft", prompts, [1] * len(prompts))  # of prompts in the prefix cache no log-probs are computed
    predicted = predictions(files, "draft", list(zip(prompts, own, strict=True)))
    tokens, rounds, accepted, blocks = [], [], [], []
    for row, (text, (chosen, _), offset) in enumerate(zip(own, predicted, offsets, strict=True)):
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


def continued(files: PairFiles, role: str, prompts: Sequence[list[int]], limits: Sequence[int], share: float = 0.0
            ) -> list[list[int]]:  # fmt: skip
    """Greedy continuation of each prompt by at most so many tokens, an end token included.

    `share`: of the work of this worker's part of the rows; 0: no progress is reported.
    """
    from vllm import SamplingParams

    stops = sorted(end_tokens(files.folder))
    asked = [k for k, limit in enumerate(limits) if limit > 0]
    params = {n: SamplingParams(temperature=0.0, max_tokens=n, stop_token_ids=stops, detokenize=False)
              for n in {limits[k] for k in asked}}
    done = _generate(files, role, [prompts[k] for k in asked], [params[limits[k]] for k in asked], share)
    continued: list[list[int]] = [[] for _ in prompts]
    for k, output in zip(asked, done, strict=True):
        continued[k] = list(output.outputs[0].token_ids)
    return continued


def predictions(
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
        return _generate(files, role, [texts[k][0] + texts[k][1] for k in which], [params] * len(which))

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


def _generate(
    files: PairFiles, role: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], share: float = 0.0
) -> list[RequestOutput]:
    engine = _engines(files)[role].llm_engine
    for k, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(k), {"prompt_token_ids": ids}, asked)
    latest: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        latest |= {int(output.request_id): output for output in engine.step()}
        if share:
            made = sum(params[k].max_tokens if output.finished else len(output.outputs[0].token_ids)
                       for k, output in latest.items())
            report_share(share * made / sum(asked.max_tokens for asked in params))
    return [latest[k] for k in range(len(prompts))]


def _up_to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """The ids up to the first end token."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]
