"""A refined model as its own drafter in vLLM: the windows of commit_rules, and greedy tokens over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dllm_reasoning.inference.generator import iterative_generate
from dllm_reasoning.inference.settings import NOISE_KEY, WINDOW_KEY, SelfDraftSettings, self_draft_options
from scripts.serve_spd import flags_of
from tests.helpers.http_server import get, post
from tests.helpers.models import save_tiny_llama
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer

WINDOW, NOISE, EOS, LIMIT = 5, 3, 2, 24


@pytest.fixture(scope="module")
def refined(tmp_path_factory):
    """A random model that says it was trained on a window: its guesses are poor, its greedy tokens are not."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("refined") / "model")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)  # distinct logits: rounding must not decide
    model.config.update({WINDOW_KEY: WINDOW, NOISE_KEY: NOISE})
    model.save_pretrained(folder)
    return folder, model


def drafter_of(model, options):
    """The drafter that vLLM makes of these options."""
    from dllm_reasoning.inference.vllm_drafter import SelfDrafter

    config = SimpleNamespace(hf_config=model.config)
    return SelfDrafter(SimpleNamespace(model_config=config, additional_config=options["additional_config"]))


def rounds(model, drafter, prompt, drafts, counted=None):
    """vLLM's part, played by a loop: verify the drafts in one forward, keep the confirmed ones among the first
    `counted`, and one token more. Yields (text, drafts, how many were confirmed, the next drafts)."""
    text = list(prompt)
    while len(text) < len(prompt) + LIMIT and EOS not in text[len(prompt) :]:
        with torch.no_grad():
            logits = model(torch.tensor([text + drafts])).logits[0, len(text) - 1 :]
        predicted, guesses = logits.argmax(-1).tolist(), drafts[:counted]
        agreed = next((i for i, d in enumerate(guesses) if d != predicted[i]), len(guesses))
        drafter.observe(logits, [len(drafts)])
        text = text + predicted[: agreed + 1]
        before, (drafts,) = drafts, drafter.propose([predicted[: agreed + 1]], None, None)
        yield text, before, agreed, drafts


def answer_in(text, prompt):
    """The answer that the text has after the prompt, up to its end token or the limit."""
    new = text[len(prompt) :][:LIMIT]
    return new[: new.index(EOS) + 1] if EOS in new else new


def prompts(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 60, (6,), generator=generator).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    "mode, budget, running, expected",
    [("slide", 1, 64, (4, 0)), ("verify", 1, 64, (4, 4)), ("auto", 64, 1, (4, 4)), ("auto", 64, 7, (4, 4)),
     ("auto", 64, 8, (4, 0)), ("auto", 64, 16, (3, 0)), ("auto", 64, 32, (1, 0)), ("auto", 64, 33, (0, 0)),
     ("auto", 64, 500, (0, 0))],
)  # fmt: skip
def test_windows_shrink_with_the_running_requests_and_modes_are_kept(mode, budget, running, expected):
    assert SelfDraftSettings(mode=mode, tokens_per_step=budget).window(4, running) == expected


def test_fewer_guesses_than_those_of_the_trained_window():
    modes = {mode: SelfDraftSettings(mode=mode, guesses=3) for mode in ("slide", "verify", "redraft", "auto")}
    assert {mode: each.window(7, 1) for mode, each in modes.items()} == {
        "slide": (3, 0), "verify": (3, 3), "redraft": (3, 3), "auto": (3, 3),
    }  # fmt: skip
    assert [modes[mode].max_draft_tokens(7) for mode in modes] == [3, 6, 6, 6]
    assert SelfDraftSettings(mode="auto", tokens_per_step=1).max_draft_tokens(7) == 14  # few requests may follow many
    assert SelfDraftSettings(mode="verify", guesses=9).window(4, 1) == (4, 4)


def test_a_model_without_a_window_and_wrong_settings_are_refused(tiny_llama):
    with pytest.raises(ValueError, match=f"no {WINDOW_KEY}"):
        self_draft_options(tiny_llama)
    with pytest.raises(ValueError, match="mode"):
        self_draft_options(tiny_llama, mode="wide")


@pytest.mark.process
@pytest.mark.parametrize("mode", ["slide", "verify"])
def test_its_windows_are_those_of_our_own_generation(refined, mode):
    """Unlike vLLM, which also keeps a noise token that happens to be right, the loop keeps guesses only, as our own
    generation does."""
    folder, model = refined
    asked = prompts(6)
    ours = iterative_generate(model, asked, EOS, 0, refine_iter=mode, max_new_tokens=LIMIT, return_details=True)
    drafter = drafter_of(model, self_draft_options(folder, mode=mode))
    for prompt, expected, forwards in zip(asked, ours.tokens, ours.stats.forwards, strict=True):
        drafts = [NOISE] * sum(SelfDraftSettings(mode=mode).window(WINDOW - 1, 1))  # our own first window
        texts = [text for text, *_ in rounds(model, drafter, prompt, drafts, WINDOW - 1)]
        assert answer_in(texts[-1], prompt) == expected and len(texts) == forwards


@pytest.mark.process
def test_redraft_verifies_nothing_but_drafts_from_committed_tokens(refined):
    folder, model = refined
    asked, guesses, confirmed = prompts(6), 3, set()
    expected = iterative_generate(model, asked, EOS, 0, 0, 0, LIMIT, return_details=True).tokens
    options = self_draft_options(folder, mode="redraft", guesses=guesses)
    assert options["speculative_config"]["num_speculative_tokens"] == 2 * guesses
    drafter = drafter_of(model, options)
    for prompt, answer in zip(asked, expected, strict=True):
        for text, before, agreed, drafts in rounds(model, drafter, prompt, []):
            fed = len(before) - guesses  # guesses; below 0 after the prompt, whose forward drafts nothing
            if not before or agreed < fed:
                assert drafts == [NOISE] * guesses
            elif agreed == fed:
                fresh = model(torch.tensor([text[:-1] + [NOISE] * guesses])).logits[0, len(text) - 1 :].argmax(-1)
                assert drafts == fresh.tolist() + [NOISE] * guesses
                confirmed.add(agreed)
        assert answer_in(text, prompt) == answer
    assert {0, guesses} <= confirmed


@pytest.mark.process
@pytest.mark.parametrize("drafting", [{}, {"mode": "redraft", "guesses": 2}], ids=["auto", "redraft"])
def test_greedy_answers_over_http_are_those_of_the_model_alone(refined, tmp_path, drafting):
    folder, model = refined
    options = self_draft_options(folder, **drafting)
    del options["model"]
    flags = [*flags_of(options), "--max-num-seqs", "8", "--dtype", "float32"]
    server = LocalVllmServer(folder, tmp_path / "server.log", 128, flags)
    try:
        url = server.wait_ready(300)

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": LIMIT, "temperature": 0.0, "return_token_ids": True}
            return post(f"{url}/v1/completions", body)["choices"][0]["token_ids"]

        asked = prompts(24)
        with ThreadPoolExecutor(8) as pool:  # verify alone, slide with others: the number of requests varies
            together = list(pool.map(ask, asked))
        alone = [ask(prompt) for prompt in asked[:6]]
        page = get(f"{url}/metrics")
    finally:
        server.stop()
    expected = iterative_generate(model, asked, EOS, 0, 0, 0, LIMIT, return_details=True).tokens
    assert together == expected and alone == expected[:6]
    (drafted,) = [line for line in page.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
    assert float(drafted.split()[-1]) > 0
