"""Enters the rollout servers into the configuration of a Prometheus that runs on this machine."""

import os
import urllib.request
from pathlib import Path

import yaml
from loguru import logger

from verl.config.rollout import PrometheusConfig

JOB = "rollout"


def update_prometheus_config(config: PrometheusConfig, server_addresses: list[str]) -> None:
    """Make `server_addresses` ("host:port") the targets of job "rollout" in `config.file`; let Prometheus reload it.

    Other jobs and settings of the file stay. Without a Prometheus at `config.port` of this machine this warns: one that
    is started later reads the file.
    """
    file = Path(config.file).expanduser()
    settings = (yaml.safe_load(file.read_text()) if file.exists() else None) or {"global": {"scrape_interval": "10s"}}
    others = [job for job in settings.get("scrape_configs") or [] if job.get("job_name") != JOB]
    job = {"job_name": JOB, "metrics_path": "/metrics", "static_configs": [{"targets": list(server_addresses)}]}
    settings["scrape_configs"] = [*others, job]
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(yaml.safe_dump(settings, sort_keys=False))
    unfinished.replace(file)
    url = f"http://127.0.0.1:{config.port}/-/reload"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5.0).close()
    except OSError as error:
        how = "rollout.prometheus.port is its port, and it must be started with --web.enable-lifecycle"
        logger.warning(f"Prometheus does not reload its configuration at {url} ({error}); {how}")
