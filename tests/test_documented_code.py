"""The Python and YAML blocks of README and docs run; each has a test here, or is a file that another test runs."""

import asyncio
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from examples.pretrained.gsm8k.questions import CANDIDATES, CHOSEN, asked
from tests.helpers.documents import ROOT, pages
from tests.helpers.http_server import serving
from tests.helpers.sft_run import compose_sft
from tests.reward.test_managers import TOKENIZER, batch
from tests.spd.vllm_plugin.pair import LIMIT, make_pair, make_prompts
from verl.agents.agent_loop.base import DictConfigWrap
from verl.agents.tools.tool_registry import initialize_tools_from_config
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import get_sft_dataset_class
from verl.rollout.replica import TokenOutput
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config import RolloutConfig

BLOCK = re.compile(r"(?<!\.py -->\n)^```(python|yaml)\n(.*?)^```", re.S | re.M)  # without the files of the tree
BLOCKS = {
    (page.relative_to(ROOT).as_posix(), number): text
    for page in pages()
    for number, (_, text) in enumerate(BLOCK.findall(page.read_text()))
}


def names_after(page, number=0, replaced=(), **names):
    """The names that a block defines, run with `names` and with pairs of texts replaced."""
    text = BLOCKS[page, number]
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    exec(compile(text, f"{page}, block {number}", "exec"), names)
    return names


def test_every_block_has_a_test():
    assert set(BLOCKS) == {
        ("docs/agents.md", 0), ("docs/agents.md", 1), ("docs/agents.md", 2),
        ("docs/extending.md", 0), ("docs/extending.md", 1), ("docs/extending.md", 2), ("docs/rewards.md", 0),
        ("docs/scorers.md", 0), ("docs/serving.md", 0), ("docs/sft.md", 0), ("docs/dllm.md", 0), ("docs/dllm.md", 1),
    }  # fmt: skip


def test_the_judge():
    judge = names_after("docs/scorers.md")["likely"](0.25)
    logits = torch.tensor([[[0.6, 0.3, 0.1], [0.02, 0.03, 0.95], [1.0, 1.0, 1.0]]]).log()
    block = SimpleNamespace(target_logits=logits, draft_ids=torch.tensor([[1, 0]]))
    assert judge(block).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("48 / 2 = 24. The answer is 72.", (1, 1, 1)),
        ("The answer is 7. No: The answer is\n$ 72", (1, 1, 1)),
        ("x" * 400 + " The answer is 72", (0.9, 1, 1)),
        ("The answer is 7,200", (0, 0, 1)),
        ("The answer is seventy-two", (0, 0, 1)),
        ("72", (0, 0, 0)),
        ("72" * 201, (-0.1, 0, 0)),
    ],
)
def test_the_own_reward_on_gsm8k_reads_the_row_that_the_page_shows(answer, expected):
    page = (ROOT / "docs/extending.md").read_text().partition("### Your own reward on GSM8K")[2]
    columns = re.search(r"^`data_source=.*`$", page, re.M)[0].replace("`", "").replace(", ...", "")
    shown = eval(f"dict({columns})")
    natalia = {"question": "Natalia sold clips", "answer": "48+24 = 72 clips\n#### 72"}
    row = asked(CANDIDATES[CHOSEN], natalia, 0, "train")
    for name, value in shown.items():
        assert row[name] == value if isinstance(value, str) else value.items() <= row[name].items()
    assert row["prompt"][-1]["content"] == natalia["question"]
    function = names_after("docs/extending.md", 1)["compute_score"]
    truth = shown["reward_model"]["ground_truth"]
    result = function("openai/gsm8k", answer, ground_truth=truth, extra_info=shown["extra_info"])
    assert result == pytest.approx(dict(zip(("score", "acc", "marker"), expected, strict=True)))


def test_the_reward_manager_takes_a_cost_from_each_token():
    manager = names_after("docs/extending.md", 2)["ShortAnswers"](TOKENIZER, 0, lambda **row: 1.0, cost=0.25)
    scores = manager(batch(answers=("1 2 3", "7")))  # 3 tokens and 1
    assert scores.tolist() == [[0, 0, 0.25, 0], [0.75, 0, 0, 0]]


@pytest.mark.parametrize(("answer", "score"), [("Yes.", 1.0), ("No.", 0.0)])
def test_the_reward_function_that_asks_a_model(answer, score):
    function = names_after("docs/rewards.md")["compute_score"]
    with serving(lambda request: (200, {"choices": [{"message": {"content": answer}}]})) as (url, asked):
        assert asyncio.run(function("any", "4", "four", {}, url.removeprefix("http://"), None)) == {"score": score}
    assert "Is 4 the same as four?" in asked[0]["messages"][0]["content"]


def test_the_agent_loop(tiny_llama):
    loop_class = names_after("docs/agents.md", 2)["CheckedLoop"]
    tokenizer = hf_tokenizer(tiny_llama)
    end = tokenizer.eos_token_id
    answers, asked = iter([[7], [8, end]]), []

    async def generate(request_id, *, prompt_ids, sampling_params):
        asked.append((prompt_ids, sampling_params["max_tokens"]))
        ids = next(answers)
        return TokenOutput(token_ids=ids, log_probs=[-float(i) for i in ids])

    server = SimpleNamespace(rollout_config=RolloutConfig(name="vllm", response_length=100), generate=generate)
    config = OmegaConf.create({"data": {}, "actor_rollout_ref": {"model": {"path": tiny_llama}}})
    loop = loop_class(DictConfigWrap(config), server, tokenizer, None)
    messages = [{"role": "user", "content": "1 + 1"}]
    output = asyncio.run(loop.run({}, raw_prompt=messages, request_id="a"))
    assert output.prompt_ids == loop.encoder.prompt(messages) and output.prompt_ids
    given = [end, *loop.encoder.encode_appended([{"role": "user", "content": "Check it."}])]  # the first answer was cut
    assert output.response_ids == [7, *given, 8, end] and output.response_mask == [1, *[0] * len(given), 1, 1]
    assert output.response_logprobs == [-7.0, *[0.0] * len(given), -8.0, -float(end)] and output.num_turns == 4
    assert asked == [(output.prompt_ids, 50), ([*output.prompt_ids, 7, *given], 99 - len(given))]
    assert output.extra_fields == {"end_reason": "stop", "weights_versions": [None, None]}


def test_the_smallest_tool_is_found_by_its_entry(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(BLOCKS["docs/agents.md", 0])
    (tmp_path / "tools.yaml").write_text(BLOCKS["docs/agents.md", 1])
    monkeypatch.syspath_prepend(tmp_path)
    (tool,) = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert tool.name == "reverse" and tool.config["example_arguments"] == {"text": "abc"}
    response, reward, metrics = asyncio.run(tool.execute("one", {"text": "abc"}))
    assert (response.text, reward, metrics) == ("cba", 0.0, {})


def test_the_pairs_are_rows_of_sft_and_so_are_conversations(tmp_path, tiny_llama):
    folder = [(f'"{name}.parquet"', f'"{tmp_path}/{name}.parquet"') for name in ("sft_train", "sft_val")]
    pairs = names_after("docs/sft.md", replaced=folder)["pairs"]
    turns = [[("user", pair["question"]), ("assistant", pair["answer"])] for pair in pairs]
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    pd.DataFrame(chats).to_parquet(tmp_path / "chats.parquet")
    tokenizer, learned = hf_tokenizer(tiny_llama), []
    for name, several_turns, rows in (("sft_train", "false", 352), ("sft_val", "false", 48), ("chats", "true", 400)):
        options = {"data__max_length": 64, "data__multiturn__enable": several_turns}
        settings = compose_sft(tmp_path, tiny_llama, **options).data
        data = get_sft_dataset_class(settings)(f"{tmp_path}/{name}.parquet", tokenizer, settings)
        assert len(data) == rows
        learned += [row["input_ids"][row["loss_mask"].bool()].tolist() for row in (data[i] for i in range(rows))]
    sums = [tokenizer(f"{a + b}", add_special_tokens=False)["input_ids"] for a in range(20) for b in range(20)]
    expected = [[*ids, tokenizer.eos_token_id] for ids in sums]
    assert sorted(learned[:400]) == sorted(expected) and learned[400:] == expected


def test_the_data_are_rows_of_the_data_set(tmp_path, tiny_llama):
    folder = [(f'"{name}.parquet"', f'"{tmp_path}/{name}.parquet"') for name in ("train", "val")]
    names_after("docs/extending.md", replaced=folder)
    tokenizer = hf_tokenizer(tiny_llama)
    settings = {"max_prompt_length": 64, "prompt_key": "prompt"}
    data = RLHFDataset(f"{tmp_path}/train.parquet", tokenizer, OmegaConf.create(settings))
    row = data[57]
    a, b = divmod(row["index"], 20)
    assert len(data) == 352 and row["input_ids"].shape == (64,)
    assert row["reward_model"]["ground_truth"] == str(a + b) and row["data_source"] == "my_sums"


def test_answers_of_main_generation_become_data_of_a_refinement(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = [f"it is {i}" for i in range(60)]
    answers[7] = "cut " * 300
    chats = [[{"role": "system", "content": "brief"}, {"role": "user", "content": f"{i} ?"}] for i in range(60)]
    rows = {"prompt": chats, "responses": [[answer] for answer in answers]}
    pd.DataFrame(rows).to_parquet("answers.parquet")
    names_after("docs/dllm.md", replaced=[("DIR", tiny_llama)])
    train, val = (pd.read_parquet(f"own_answers{name}.parquet") for name in ("", "_val"))
    kept = [i for i in range(60) if i != 7]
    assert len(val) == 5 and [*train["instruction"], *val["instruction"]] == [f"{i} ?" for i in kept]
    assert [*train["output"], *val["output"]] == [answers[i] for i in kept]


def test_generation_in_blocks(tiny_llama):
    names = names_after("docs/dllm.md", 1, replaced=[('"refined"', f'"{tiny_llama}"')])
    given = names["input_ids"].shape[1]
    assert names["answer"].tolist() == names["output_ids"][0, given:].tolist() == names["details"].tokens[0]


@pytest.mark.process
@pytest.mark.long
def test_a_scorer_in_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    pair, prompts = make_pair(tmp_path), make_prompts(4)
    replaced = [(f"/models/{name}", getattr(pair, name)) for name in ("target", "draft", "scorer")]
    replaced += [("max_tokens=400", f"max_tokens={LIMIT}"), ("llm.generate(", "answers += llm.generate(")]
    # An untrained scorer accepts something at a low threshold; rounding must not decide.
    replaced += [("threshold=1.0", "threshold=-1.0, dtype='float32'")]
    names = names_after(
        "docs/serving.md", replaced=replaced, answers=[], prompts=[{"prompt_token_ids": ids} for ids in prompts]
    )
    names["llm"].llm_engine.engine_core.shutdown()
    tokens = [list(answer.outputs[0].token_ids) for answer in names["answers"]]
    assert tokens[4:] == pair.decode(prompts, None).tokens != tokens[:4]
