"""Servers in the configuration of a Prometheus, which is asked to reload it."""

import yaml

from tests.helpers.http_server import serving
from tests.helpers.logs import logged
from verl.agents.agent_loop.prometheus_utils import update_prometheus_config
from verl.workers.config import PrometheusConfig


def test_the_servers_are_one_job_next_to_others(tmp_path):
    file, requests = tmp_path / "a" / "prometheus.yml", []
    with serving(lambda request: (200, requests.append(request.path))) as (url, _):
        config = PrometheusConfig(enable=True, port=int(url.rpartition(":")[2]), file=str(file))
        update_prometheus_config(config, ["h:1"])
        settings = yaml.safe_load(file.read_text())
        settings["scrape_configs"].insert(0, {"job_name": "ray"})
        file.write_text(yaml.safe_dump(settings))
        update_prometheus_config(config, ["h:2", "h:3"])
    first, second = yaml.safe_load(file.read_text())["scrape_configs"]
    assert first == {"job_name": "ray"}
    assert second["job_name"] == "rollout" and second["static_configs"] == [{"targets": ["h:2", "h:3"]}]
    assert requests == ["/-/reload"] * 2


def test_a_prometheus_that_does_not_answer_is_a_warning(tmp_path):
    with logged() as lines:
        update_prometheus_config(PrometheusConfig(port=9, file=str(tmp_path / "p.yml")), ["h:1"])
    assert "http://127.0.0.1:9/-/reload" in lines[0] and (tmp_path / "p.yml").exists()
