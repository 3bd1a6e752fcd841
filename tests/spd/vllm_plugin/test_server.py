"""One vLLM server with a scorer: its answers are those of the recipe's own decoder."""

import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.spd.vllm_plugin import engine_options
from scripts.serve_spd import flags_of
from tests.helpers.http_server import get, post
from tests.spd.vllm_plugin.pair import EOS, GAMMA, LIMIT, make_pair, make_prompts
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer

pytestmark = pytest.mark.process
THRESHOLDS = (-1.0, 0.0, 1.0)
MIDDLEWARE = ["--middleware", "recipe.spd.vllm_plugin.http.CountsMiddleware"]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def served(request, tmp_path_factory):
    """The pair and the server's URL."""
    folder = tmp_path_factory.mktemp("served_scorer")
    pair = make_pair(folder, tied=request.param)
    options = engine_options(pair.target, pair.scorer, draft=pair.draft, gamma=GAMMA)
    del options["model"]
    extra = [*flags_of(options), *MIDDLEWARE, "--max-num-seqs", "16", "--per-request-spec-decode-metrics", "summary"]
    extra += ["--dtype", "float32"]  # in which a token's logits do not depend on the batch
    server = LocalVllmServer(pair.target, folder / "server.log", 128, extra)
    try:
        yield pair, server.wait_ready(300)
    finally:
        server.stop()


def ask(url, prompt, **settings):
    body = {"prompt": prompt, "max_tokens": LIMIT, "temperature": 0.0, "return_token_ids": True, **settings}
    return post(f"{url}/v1/completions", body)


def tokens_of(reply):
    return reply["choices"][0]["token_ids"]


def test_requests_of_mixed_thresholds_in_one_batch_equal_the_decoder(served):
    pair, url = served
    prompts = make_prompts(16)
    wanted = {None: {"spd": 0}, **{t: {"spd_threshold": t} for t in THRESHOLDS}}
    jobs = [(prompt, xargs) for prompt in prompts for xargs in wanted.values()]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda job: tokens_of(ask(url, job[0], vllm_xargs=job[1])), jobs))
    lossy = 0
    for number, threshold in enumerate(wanted):
        reference = pair.decode(prompts, threshold)
        assert got[number :: len(wanted)] == reference.tokens
        lossy += sum(reference.accepted_mismatches)
    assert lossy > 30  # the scorer decided something
    default = [tokens_of(ask(url, prompt)) for prompt in prompts]
    assert default == pair.decode(prompts, 0.0).tokens  # the engine's own threshold


def test_forbidden_tokens_are_never_let_through(served):
    _, url = served
    everything = {"vllm_xargs": {"spd_threshold": -1e9}}
    for prompt in make_prompts(8):
        free = tokens_of(ask(url, prompt, **everything))
        forbidden = max(set(free) - {EOS}, key=free.count)
        allowed = [token for token in range(64) if token != forbidden]
        limited = tokens_of(ask(url, prompt, allowed_token_ids=allowed, **everything))
        assert forbidden in free and forbidden not in limited


def test_a_grammar_holds(served):
    """The tokenizer's words are letters and figures: their texts in a row must match."""
    _, url = served
    words = set()
    for prompt in make_prompts(8):
        grammar = {"structured_outputs": {"regex": "[a-e]{7}"}, "vllm_xargs": {"spd_threshold": -1e9}}
        text = ask(url, prompt, **grammar)["choices"][0]["text"].split()
        assert len(text) == 7 and set(text) <= set("abcde")
        words |= set(text)
    assert len(words) > 1


def test_a_minimum_of_tokens_holds(served):
    _, url = served
    for prompt in make_prompts(8):
        reply = ask(url, prompt, min_tokens=12, vllm_xargs={"spd_threshold": -1e9})
        assert len(tokens_of(reply)) >= 12


def test_log_probs_are_the_targets_own(served):
    pair, url = served
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    let_through = 0
    for prompt in make_prompts(8):
        choice = ask(url, prompt, logprobs=1, vllm_xargs={"spd_threshold": -1.0})["choices"][0]
        ids = choice["token_ids"]
        with torch.no_grad():
            logits = target(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-3)
        let_through += int((logits.argmax(-1) != torch.tensor(ids)).sum())
    assert let_through > 0  # mismatches


def test_counts_are_on_the_metrics_page_and_by_request(served):
    _, url = served
    before = json.loads(get(f"{url}/spd/counts"))
    reply = ask(url, make_prompts(1)[0], vllm_xargs={"spd_threshold": -1e9})
    counts = json.loads(get(f"{url}/spd/counts/{reply['id']}"))
    (own,) = counts.values()
    assert own["matched"] > 0 and own["judged"] >= own["let_through"] > 0
    after = json.loads(get(f"{url}/spd/counts"))
    assert {name: after[name] - before[name] for name in after} == own
    page = get(f"{url}/metrics")
    for name, value in after.items():
        assert f"spd:{name}_tokens_total {float(value)}" in page
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{url}/spd/counts/cmpl-unknown")
    reply = ask(url, make_prompts(1)[0], n=2, temperature=1.0, ignore_eos=True)
    answers = json.loads(get(f"{url}/spd/counts/{reply['id']}"))
    assert sorted(request[:2] for request in answers) == ["0_", "1_"]


def test_exact_sampled_requests_follow_the_targets_distribution(served):
    """Without repair_expand_kernel tokens after the first would be drawn at uninitialised temperatures."""
    pair, url = served
    prompt = make_prompts(1)[0]
    settings = {"temperature": 1.0, "max_tokens": 4, "n": 1000, "vllm_xargs": {"spd": 0}, "ignore_eos": True}
    replies = [ask(url, prompt, seed=seed, **settings) for seed in range(3)]
    drawn = torch.tensor([choice["token_ids"][:2] for reply in replies for choice in reply["choices"]])
    firsts, which = drawn[:, 0].unique(return_inverse=True)
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    with torch.no_grad():
        texts = torch.tensor([[*prompt, first] for first in firsts.tolist()])
        each = target(texts).logits[:, -1].softmax(-1)[which]  # of the second token, given each first one
    frequencies = torch.bincount(drawn[:, 1], minlength=each.shape[1]) / len(drawn)
    distance = (frequencies - each.mean(0)).abs().sum() / 2
    noise = (each * (1 - each)).mean(0).div(len(drawn)).sqrt().sum() / 2  # about that of a fair sample
    assert len(firsts) > 3 and distance < 1.5 * noise
