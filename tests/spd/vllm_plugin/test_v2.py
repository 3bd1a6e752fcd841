"""The scorer in vLLM's V2 model runner, whose kernels run in Triton's interpreter: `make test-v2`."""

import os

import pytest

from recipe.spd.vllm_plugin import engine_options
from tests.spd.vllm_plugin.pair import EOS, GAMMA, LIMIT, make_pair, make_prompts

pytestmark = pytest.mark.v2


class InterpreterDriver:
    """What vLLM asks of Triton's CPU backend, which Triton's wheel lacks: whether there is one."""

    @classmethod
    def is_active(cls):
        return True


def test_answers_of_the_v2_runner_equal_the_decoder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert os.environ["TRITON_INTERPRET"] == os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    from triton.backends import Backend, backends

    backends.setdefault("cpu", Backend(compiler=None, driver=InterpreterDriver))  # before vLLM looks for Triton
    from vllm import LLM, SamplingParams

    pair, prompts = make_pair(tmp_path), make_prompts(4)
    size = dict(max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True)
    llm = LLM(
        **engine_options(pair.target, pair.scorer, draft=pair.draft, gamma=GAMMA), dtype="float32", enforce_eager=True,
        **size,
    )  # fmt: skip
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    for threshold in (None, 0.0):
        xargs = {"spd": 0} if threshold is None else {"spd_threshold": threshold}
        params = SamplingParams(
            temperature=0, max_tokens=LIMIT, stop_token_ids=[EOS], detokenize=False, extra_args=xargs
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        expected = pair.decode(prompts, threshold)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected.tokens
        (counts,) = llm.collective_rpc("spd_counts")
        assert counts["matched"] > 0 and (counts["let_through"] > 0) == (threshold is not None)
