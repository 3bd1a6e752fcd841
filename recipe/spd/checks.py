"""Checks of the SPD recipe before a run starts (servers, token ids, the saved scorer), and the scorer's size."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from loguru import logger
from transformers import AutoConfig

from recipe.spd.data.blocks import SEP_VARIABLE, resolve_sep_token_id
from recipe.spd.data.dataset import SPDRLHFDataset
from recipe.spd.rollout.client import URLS_VARIABLE, CompletionClient, server_urls
from recipe.spd.rollout.store import check_store_path
from recipe.spd.scorer.auto import SCORERS
from recipe.spd.scorer.config import ScoringModelConfig
from recipe.spd.scorer.features import StoreError
from recipe.spd.settings import SPDSettings
from verl.config.compose import to_plain
from verl.data.fingerprint import folder_fingerprint, model_folder
from verl.planning.checks import ModelError, check_url, check_written, load_model_part
from verl.planning.memory_estimate import MEASURES, ModelSize, measure_model
from verl.utils.problems import Problem, register_check, wrong
from verl.utils.redact import redact_text
from verl.utils.tokenizer import check_tokenizers, hf_tokenizer


@register_check
def check_servers_and_separator(config: Any, findings: Any) -> Iterator[Problem]:
    """Wrong settings of group spd, a store on a network file system, a missing separator or model; servers that do not
    answer are absent.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "spd":
        return
    try:
        settings = SPDSettings.from_custom(rollout.custom)
        urls = server_urls(settings.rollout.servers)
    except (TypeError, ValueError) as e:
        yield wrong("spd", str(e))
        return
    try:
        check_store_path(Path(settings.rollout.store_path).expanduser())
    except StoreError as e:
        yield wrong("spd.rollout.store_path", str(e))
    yield from check_written("spd.rollout.store_path", settings.rollout.store_path, is_folder=False)
    yield from check_written("spd.feature_store", settings.feature_store)
    if not urls:
        yield from check_written("spd.rollout.server_log", settings.rollout.server_log, is_folder=False)
    yield from _check_servers(urls, settings, f"spd.rollout.servers ({URLS_VARIABLE})")
    models = {"spd.target_path": settings.target_path}
    if settings.rollout.rounds > 1:
        models["spd.rollout.draft_path"] = settings.rollout.draft_path
    for key, path in models.items():
        if path == config.actor_rollout_ref.model.path:
            continue
        try:
            load_model_part(key, path, AutoConfig.from_pretrained)
        except ModelError as e:
            yield e.problem
    if settings.rollout.rounds > 1:
        yield from _check_draft(settings)
    if findings.tokenizer is not None:
        try:
            resolve_sep_token_id(findings.tokenizer, read=SCORERS[settings.backbone].reads_separator)
        except ValueError as e:
            yield wrong(SEP_VARIABLE, str(e))


def _check_draft(settings: Any) -> Iterator[Problem]:
    """A draft of another vocabulary than the target's is wrong."""
    key, draft = "spd.rollout.draft_path", settings.rollout.draft_path
    try:
        target = load_model_part("spd.target_path", settings.target_path, hf_tokenizer)
        check_tokenizers(target, load_model_part(key, draft, hf_tokenizer), f"{key}={draft}")
    except ModelError as e:
        yield e.problem
    except ValueError as e:
        yield wrong(key, str(e))


def _check_servers(urls: list[str], settings: Any, key: str) -> Iterator[Problem]:
    """A server of another model is wrong; absent if none answers (a warning while another one does)."""
    problems = {url: check_url(key, f"{url}/v1/models") for url in urls}
    answering = [url for url in urls if not problems[url]]
    for problem in itertools.chain.from_iterable(problems.values()):
        if answering:
            logger.warning("{}", problem.message)
        else:
            fix = f"Start it, or unset {URLS_VARIABLE} and spd.rollout.servers: then a local one is started."
            yield replace(problem, message=f"{problem.message} {fix}")
    if not answering:
        return
    options = replace(settings.rollout, timeout_s=10.0)
    try:
        CompletionClient(answering, settings.target_path, eos_token_ids=[], settings=options).check_model()
    except (RuntimeError, OSError, ValueError) as e:
        yield wrong(key, f"{key}: {redact_text(str(e))}")


@register_check
def check_ids(config: Any, findings: Any) -> Iterator[Problem]:
    """Prepared blocks must hold ids within the model's vocabulary, the separator that an own backbone reads, and the
    complete context that a target head's states depend on.
    """
    blocks = {key: data for key, data in findings.datasets.items() if isinstance(data, SPDRLHFDataset)}
    if not blocks or findings.hf_config is None or findings.tokenizer is None:
        return
    path, longest = config.actor_rollout_ref.model.path, config.data.max_prompt_length
    reads_separator = SCORERS[config.spd.backbone].reads_separator
    vocabulary = findings.hf_config.get_text_config().vocab_size
    try:
        separator = resolve_sep_token_id(findings.tokenizer, read=reads_separator)
    except ValueError:
        return  # reported by check_servers_and_separator
    for key, data in blocks.items():
        foreign = data.largest_ids >= vocabulary
        unfit = data.separators != separator if reads_separator else data.lengths > longest
        bad = np.flatnonzero(foreign | unfit)
        if not bad.size:
            continue
        item = int(bad[0])
        if foreign[item]:
            what = (
                f"token id {data.largest_ids[item]} is outside the vocabulary ({vocabulary}) of the model {path}. Name "
                "the tokenizer that belongs to the model, and prepare the blocks with it."
            )
        elif not reads_separator:
            what = (
                f"its {data.lengths[item]} ids exceed data.max_prompt_length={longest}: a target "
                "head would train on states of a context without its start, and serve on those of the complete one. "
                f"Raise data.max_prompt_length to {data.lengths.max()}."
            )
        else:
            used = data.separators[item]
            what = (
                f"its parts are separated by token id {used}, the tokenizer's separator is {separator}. "
                f"Prepare it again, or set {SEP_VARIABLE}={used}."
            )
        yield wrong(key, f"{key}: {data.error(item, what)}")


@register_check
def check_scorer(config: Any, findings: Any) -> Iterator[Problem]:
    """Wrong settings of the scorer; a saved scorer to start from that is damaged or of another model."""
    model = config.actor_rollout_ref.model
    if model.loader.name != "spd_scorer":
        return
    given = to_plain(model.loader.kwargs)
    given.pop("compute_dtype", None)
    try:
        scorer, group = ScoringModelConfig.from_loader(model.path, **given)
    except (TypeError, ValueError) as e:
        yield wrong("spd", str(e))
        return
    if findings.hf_config is None:
        return
    target, kind = findings.hf_config.get_text_config(), SCORERS[scorer.backbone]
    scorer.hidden_size = target.hidden_size
    try:
        kind.check_target(scorer, target)
        with torch.device("meta"):
            kind.make_head(scorer)
    except (TypeError, ValueError) as e:
        yield wrong("spd", str(e))
        return
    if not group.adapter_path:
        return
    try:
        backbone = kind.described_backbone(findings.hf_config, scorer, model.trust_remote_code)
        if not kind.is_complete(scorer) and (folder := model_folder(model.path)):
            scorer.base_fingerprint = folder_fingerprint(folder, findings.hf_config) or ""
        kind.check_trained(Path(group.adapter_path), scorer, backbone)
    except (OSError, ValueError, TypeError) as e:
        yield wrong("spd.adapter_path", f"spd.adapter_path={group.adapter_path}: {e}")


@MEASURES.register("spd_scorer")
def measure_scorer(hf_config: Any, config: Mapping[str, Any]) -> ModelSize:
    """Size of the scorer: without vocabulary logits and key/value cache; a `target` scorer trains its head only."""
    spd, actor = config["spd"], config["actor_rollout_ref"]["actor"]
    plain = measure_model(hf_config, config["actor_rollout_ref"]["model"]["lora_rank"], with_lm_head=False)
    size = replace(plain, vocabulary=1, kv_heads=0, group_forward=actor["share_prompt_forward"])
    scorer = SCORERS[spd["backbone"]]
    with torch.device("meta"):
        head = scorer.make_head(SimpleNamespace(**{**spd, "hidden_size": size.hidden}))
    of_head = sum(p.numel() for p in head.parameters())
    size = replace(size, parameters=plain.parameters + of_head)
    if scorer.trains_backbone:
        return replace(size, trainable=plain.trainable + of_head)
    return replace(size, trainable=of_head, trained_layers=0, frozen_computes=True)
