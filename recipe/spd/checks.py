"""What a dry run asks of the SPD recipe beyond the config: its servers, its separator token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
