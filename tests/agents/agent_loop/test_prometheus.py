"""Servers in the configuration of a Prometheus, which is asked to reload it."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from loguru import logger

from verl.agents.agent_loop.prometheus_utils import update_prometheus_config
from verl.workers.config import PrometheusConfig


@pytest.fixture
def prometheus():
    """The port of a server that notes the requests it gets, and those requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, requests
    server.shutdown()
    server.server_close()


def test_the_servers_are_one_job_next_to_others(tmp_path, prometheus):
    port, requests = prometheus
    file = tmp_path / "a" / "prometheus.yml"
    config = PrometheusConfig(enable=True, port=port, file=str(file))
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
    lines = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    update_prometheus_config(PrometheusConfig(port=9, file=str(tmp_path / "p.yml")), ["h:1"])
    logger.remove(sink)
    assert "http://127.0.0.1:9/-/reload" in lines[0] and (tmp_path / "p.yml").exists()
