"""What a dry run asks of the SPD recipe beyond the config: its servers, its separator token, the scorer's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from verl.utils.memory_estimate import MEASURES, ModelSize, measure_model
from verl.utils.problems import Problem, register_check, wrong


@register_check
def check_servers_and_separator(config: Any, findings: Any) -> Iterator[Problem]:
    """Settings of group spd and a missing separator are wrong anywhere; a server that does not answer is absent."""
    from verl.trainer.dry_run_checks import check_url
    from verl.utils.dataset.spd_dataset import SEP_VARIABLE, resolve_sep_token_id
    from verl.workers.rollout.spd.client import URLS_VARIABLE, server_urls
    from verl.workers.rollout.spd.settings import SPDSettings

    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "spd":
        return
    try:
        settings = SPDSettings.from_custom(rollout.custom)
        urls = server_urls(settings.rollout.servers)
    except (TypeError, ValueError) as e:
        yield wrong("spd", str(e))
        return
    for url in urls:
        yield from check_url(f"spd.rollout.servers ({URLS_VARIABLE})", f"{url}/v1/models")
    if findings.tokenizer is not None:
        try:
            resolve_sep_token_id(findings.tokenizer)
        except ValueError as e:
            yield wrong(SEP_VARIABLE, str(e))


@MEASURES.register("spd_scorer")
def measure_scorer(hf_config: Any, config: Mapping[str, Any]) -> ModelSize:
    """The scorer's sizes: no logits over a vocabulary, and of a `target` scorer only the head trains."""
    width, actor = config["spd"]["head_size"], config["actor_rollout_ref"]["actor"]
    plain = measure_model(hf_config, config["actor_rollout_ref"]["model"]["lora_rank"], with_lm_head=False)
    size = replace(plain, vocabulary=1, group_forward=actor["share_prompt_forward"])
    if config["spd"]["backbone"] == "own":
        quarter = size.hidden // 4
        head = 2 * size.hidden + (size.hidden + 1) * quarter + quarter + 1
        return replace(size, parameters=plain.parameters + head, trainable=plain.trainable + head)
    head = (4 * size.hidden + 1) * width + (width + 1) * width + width + 1
    return replace(size, parameters=plain.parameters + head, trainable=head, trained_layers=0)
