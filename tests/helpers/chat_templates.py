"""Chat templates in the formats that models' publishers describe, short forms of our own, and a tokenizer of bytes.

Each has the token that ends a turn, and the text that follows that token when a tool answers "42", or a user writes
"Again", up to where the model continues; None where the format lacks that turn.
"""

import re
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Format:
    """A template; `tool`, `user`: what follows the end of the turn before."""

    template: str
    stop: str
    tool: str | None
    user: str | None
    more_stops: tuple[str, ...] = ()


def byte_tokenizer(format: Format) -> PreTrainedTokenizerFast:
    """A token a byte, and one for each marker of the template such as <|im_end|>, [INST] or </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    used = re.findall(r"<[|｜]?[\w▁/]+[|｜]?>|\[/?[A-Z_]+\]|\[\|\w+\|\]", format.template)
    markers = dict.fromkeys([format.stop, *format.more_stops, *used])
    inner.add_special_tokens([AddedToken(marker, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=format.stop)
    tokenizer.chat_template = format.template
    return tokenizer


def turns(user: str, assistant: str, tool: str = "{{ raise_exception('no tools') }}", system: str = "",
          start: str = "", prompt: str = "", end: str = "") -> str:  # fmt: skip
    """A template of one branch for each role, whose text is `c`; `prompt` where the model continues, else `end`."""
    system = system or "{{ raise_exception('no system message') }}"
    return (
        start + "{% for m in messages %}{% set c = m.content or '' %}"
        "{% if m.role == 'user' %}" + user + "{% elif m.role == 'assistant' %}" + assistant
        + "{% elif m.role == 'tool' %}" + tool + "{% else %}" + system + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + prompt + "{% else %}" + end + "{% endif %}"
    )  # fmt: skip


def calls(each: str, before: str = "", after: str = "") -> str:
    """The calls of a turn; `each` may use f.name and f.arguments."""
    return (
        "{% if m.tool_calls %}" + before + "{% for t in m.tool_calls %}{% set f = t.function %}" + each
        + "{% endfor %}" + after + "{% endif %}"
    )  # fmt: skip


def one_turn(start: str, each: str, end: str) -> str:
    """Neighbouring answers of tools as one turn."""
    return (
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}" + start + "{% endif %}" + each
        + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}" + end + "{% endif %}"
    )  # fmt: skip


HERMES_CALLS = calls('<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>')
IM = "<|im_start|>%s\n{{ c }}<|im_end|>\n"
IM_PROMPT = "<|im_start|>assistant\n"
IM_AGAIN = "\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
RESPONSE = "{{ '\\n' }}<tool_response>\n{{ c }}\n</tool_response>"
QWEN_TOOL = one_turn("<|im_start|>user", RESPONSE, "<|im_end|>\n")
QWEN_ANSWERED = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
# Thoughts of turns before the last question are left out; the last turn has an empty one if it has none.
THOUGHT = (
    "{% set thought = m.reasoning_content or '' %}{% set ns = namespace(last=-1) %}"
    "{% for other in messages %}{% if other.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ c }}"
)
LLAMA = "<|start_header_id|>%s<|end_header_id|>\n\n{{ c | trim }}<|eot_id|>"
LLAMA_PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_AGAIN = LLAMA.replace("{{ c | trim }}", "Again") % "user" + LLAMA_PROMPT
MISTRAL_RESULT = (
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs have nine characters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ c }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
)
MISTRAL_CALLS = calls('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ t.id }}"}',
                      "[TOOL_CALLS][", "]")  # fmt: skip
MISTRAL_ANSWERED = '[TOOL_RESULTS]{"content": 42, "call_id": "call00000"}[/TOOL_RESULTS]'
COHERE = "<|START_OF_TURN_TOKEN|><|%s_TOKEN|>{{ c }}<|END_OF_TURN_TOKEN|>"
COHERE_PROMPT = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
GRANITE = "<|start_of_role|>%s<|end_of_role|>{{ c }}<|end_of_text|>\n"
GRANITE_PROMPT = "<|start_of_role|>assistant<|end_of_role|>"
KIMI = "<|%s|>%s<|im_middle|>{{ c }}<|im_end|>"
KIMI_PROMPT = "<|im_assistant|>assistant<|im_middle|>"
JAMBA = "<|bom|><|%s|> {{ c }}<|eom|>"
PHI = "<|%s|>\n{{ c }}<|end|>\n"
ONE_CALL = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}"

FORMATS = {
    "chatml": Format(turns(IM % "user", IM % "assistant", IM % "tool", IM % "system", prompt=IM_PROMPT), "<|im_end|>",
                     "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n", IM_AGAIN),
    "qwen2.5": Format(turns(IM % "user", "<|im_start|>assistant\n{{ c }}" + HERMES_CALLS + "<|im_end|>\n", QWEN_TOOL,
                            IM % "system", prompt=IM_PROMPT), "<|im_end|>", QWEN_ANSWERED, IM_AGAIN),
    "qwen3": Format(turns(IM % "user", THOUGHT + HERMES_CALLS + "<|im_end|>\n", QWEN_TOOL, IM % "system",
                          prompt=IM_PROMPT), "<|im_end|>", QWEN_ANSWERED, IM_AGAIN),
    "hermes": Format(turns(IM % "user", "<|im_start|>assistant\n{{ c }}" + HERMES_CALLS + "<|im_end|>\n",
                           one_turn("<|im_start|>tool", RESPONSE, "<|im_end|>\n"), IM % "system", prompt=IM_PROMPT),
                     "<|im_end|>", QWEN_ANSWERED.replace("user", "tool", 1), IM_AGAIN),
    "llama2": Format(turns("<s>[INST] {{ c }} [/INST]", " {{ c }} </s>", system="<<SYS>>{{ c }}<</SYS>>"), "</s>", None,
                     "<s>[INST] Again [/INST]"),
    "llama3": Format(turns(LLAMA % "user", LLAMA % "assistant", system=LLAMA % "system", start="<|begin_of_text|>",
                           prompt=LLAMA_PROMPT), "<|eot_id|>", None, LLAMA_AGAIN),
    "llama3.1": Format(turns(
        LLAMA % "user", ONE_CALL + "<|start_header_id|>assistant<|end_header_id|>\n\n{{ c }}"
        + calls('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}') + "<|eot_id|>",
        LLAMA % "ipython", LLAMA % "system", start="<|begin_of_text|>", prompt=LLAMA_PROMPT), "<|eot_id|>",
        "<|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>" + LLAMA_PROMPT, LLAMA_AGAIN),
    "mistral v3": Format(turns("[INST] {{ c }}[/INST]", " {{ c }}" + MISTRAL_CALLS + "</s>", MISTRAL_RESULT,
                               start="<s>"), "</s>", MISTRAL_ANSWERED, "[INST] Again[/INST]"),
    "mistral v7": Format(turns("[INST]{{ c }}[/INST]", "{{ c }}" + MISTRAL_CALLS + "</s>", MISTRAL_RESULT,
                               "[SYSTEM_PROMPT]{{ c }}[/SYSTEM_PROMPT]", start="<s>"),
                         "</s>", MISTRAL_ANSWERED, "[INST]Again[/INST]"),
    "gemma": Format(turns("<start_of_turn>user\n{{ c | trim }}<end_of_turn>\n",
                          "<start_of_turn>model\n{{ c | trim }}<end_of_turn>\n", start="<bos>",
                          prompt="<start_of_turn>model\n"), "<end_of_turn>", None,
                    "\n<start_of_turn>user\nAgain<end_of_turn>\n<start_of_turn>model\n"),
    "phi3": Format(turns(PHI % "user", PHI % "assistant", system=PHI % "system", prompt="<|assistant|>\n",
                         end="<|endoftext|>"), "<|end|>", None, "\n<|user|>\nAgain<|end|>\n<|assistant|>\n"),
    "phi3, both tokens end": Format(turns(PHI % "user", PHI % "assistant", PHI % "tool", PHI % "system",
                                          prompt="<|assistant|>\n", end="<|endoftext|>"), "<|end|>",
                                    "\n<|tool|>\n42<|end|>\n<|assistant|>\n",
                                    "\n<|user|>\nAgain<|end|>\n<|assistant|>\n", ("<|endoftext|>",)),
    "phi4": Format(turns("<|im_start|>user<|im_sep|>{{ c }}<|im_end|>",
                         "<|im_start|>assistant<|im_sep|>{{ c }}<|im_end|>",
                         prompt="<|im_start|>assistant<|im_sep|>"), "<|im_end|>", None,
                   "<|im_start|>user<|im_sep|>Again<|im_end|><|im_start|>assistant<|im_sep|>"),
    "zephyr": Format(turns("<|user|>\n{{ c }}</s>\n", "<|assistant|>\n{{ c }}</s>\n", " ", "<|system|>\n{{ c }}</s>\n",
                           prompt="<|assistant|>\n"), "</s>", None, "\n<|user|>\nAgain</s>\n<|assistant|>\n"),
    "vicuna": Format(turns("USER: {{ c }} ", "ASSISTANT: {{ c }}</s>", system="{{ c }} ", start="<s>",
                           prompt="ASSISTANT:"), "</s>", None, "USER: Again ASSISTANT:"),
    "openchat": Format(turns("GPT4 Correct User: {{ c }}<|end_of_turn|>",
                             "GPT4 Correct Assistant: {{ c }}<|end_of_turn|>", start="<s>",
                             prompt="GPT4 Correct Assistant:"), "<|end_of_turn|>", None,
                       "GPT4 Correct User: Again<|end_of_turn|>GPT4 Correct Assistant:"),
    "deepseek v3": Format(turns(
        "<｜User｜>{{ c }}",
        "<｜Assistant｜>{{ c }}" + calls("{{ '<｜tool▁call▁begin｜>' + f.name + f.arguments }}<｜tool▁call▁end｜>")
        + "<｜end▁of▁sentence｜>", one_turn("<｜tool▁outputs▁begin｜>",
        "<｜tool▁output▁begin｜>{{ c }}<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"), "{{ c }}",
        start="<｜begin▁of▁sentence｜>", prompt="{% if messages[-1].role == 'user' %}<｜Assistant｜>{% endif %}"),
        "<｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "<｜User｜>Again<｜Assistant｜>"),
    "command r": Format(turns(
        COHERE % "USER", COHERE % "CHATBOT", COHERE.replace("{{ c }}", "<results>{{ c }}</results>") % "SYSTEM",
        COHERE % "SYSTEM", start="<BOS_TOKEN>", prompt=COHERE_PROMPT), "<|END_OF_TURN_TOKEN|>",
        COHERE.replace("{{ c }}", "<results>42</results>") % "SYSTEM" + COHERE_PROMPT,
        COHERE.replace("{{ c }}", "Again") % "USER" + COHERE_PROMPT),
    "granite": Format(turns(GRANITE % "user", GRANITE % "assistant", GRANITE % "tool_response", GRANITE % "system",
                            prompt=GRANITE_PROMPT), "<|end_of_text|>",
                      "\n" + GRANITE.replace("{{ c }}", "42") % "tool_response" + GRANITE_PROMPT,
                      "\n" + GRANITE.replace("{{ c }}", "Again") % "user" + GRANITE_PROMPT),
    "olmo2": Format(turns("<|user|>\n{{ c }}\n",
                          "<|assistant|>\n{{ c }}<|endoftext|>{% if not loop.last %}{{ '\\n' }}{% endif %}",
                          system="<|system|>\n{{ c }}\n", start="<|endoftext|>", prompt="<|assistant|>\n"),
                    "<|endoftext|>", None, "\n<|user|>\nAgain\n<|assistant|>\n"),
    "exaone": Format(turns("[|user|]{{ c }}\n", "[|assistant|]{{ c }}[|endofturn|]\n", "[|tool|]{{ c }}[|endofturn|]\n",
                           "[|system|]{{ c }}[|endofturn|]\n", prompt="[|assistant|]"), "[|endofturn|]",
                     "\n[|tool|]42[|endofturn|]\n[|assistant|]", "\n[|user|]Again\n[|assistant|]"),
    "kimi k2": Format(turns(
        KIMI % ("im_user", "user"),
        "<|im_assistant|>assistant<|im_middle|>{{ c }}" + calls("{{ f.name }}") + "<|im_end|>",
        KIMI.replace("{{ c }}", "## Return of {{ m.tool_call_id }}\n{{ c }}") % ("im_system", "tool"),
        KIMI % ("im_system", "system"), prompt=KIMI_PROMPT), "<|im_end|>",
        "<|im_system|>tool<|im_middle|>## Return of call00000\n42<|im_end|>" + KIMI_PROMPT,
        KIMI.replace("{{ c }}", "Again") % ("im_user", "user") + KIMI_PROMPT),
    "jamba": Format(turns(JAMBA % "user", JAMBA % "assistant", JAMBA % "tool", JAMBA % "system",
                          start="<|startoftext|>", prompt="<|bom|><|assistant|>"), "<|eom|>",
                    "<|bom|><|tool|> 42<|eom|><|bom|><|assistant|>",
                    "<|bom|><|user|> Again<|eom|><|bom|><|assistant|>"),
    "gpt-oss": Format(turns(
        "<|start|>user<|message|>{{ c }}<|end|>",
        "{% if m.tool_calls %}" + calls("<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} "
        "<|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>") + "{% else %}<|start|>assistant"
        "<|channel|>final<|message|>{{ c }}{% if loop.last and not add_generation_prompt %}<|return|>"
        "{% else %}<|end|>{% endif %}{% endif %}",
        "<|start|>functions.tool to=assistant<|channel|>commentary<|message|>{{ c }}<|end|>",
        "<|start|>system<|message|>{{ c }}<|end|>", prompt="<|start|>assistant"), "<|return|>",
        "<|start|>functions.tool to=assistant<|channel|>commentary<|message|>42<|end|><|start|>assistant", None,
        ("<|call|>",)),
    "glm4": Format(turns("<|user|>\n{{ c }}", "<|assistant|>\n{{ c }}", "<|observation|>\n{{ c }}",
                         "<|system|>\n{{ c }}", start="[gMASK]<sop>", prompt="<|assistant|>"),
                   "<|user|>", "\n42<|assistant|>", "\nAgain<|assistant|>", ("<|observation|>",)),
    "apertus": Format(turns(
        "<|user_start|>{{ c }}<|user_end|>",
        "<|assistant_start|>{{ c }}" + calls("<|tools_prefix|>{{ f.name }}<|tools_suffix|>")
        + "{% if not loop.last and not m.tool_calls %}<|assistant_end|>{% endif %}", "[{{ c }}]", "{{ c }}",
        prompt="{% if messages[-1].role == 'user' %}<|assistant_start|>{% endif %}"), "<|assistant_end|>",
        "[42]", "<|user_start|>Again<|user_end|><|assistant_start|>", ("<|tools_suffix|>",)),
    "apriel": Format(turns(
        "<|begin_user|>\n{{ c }}\n",
        "<|begin_assistant|>\n{{ c }}{% if not loop.last %}\n<|end|>\n{% endif %}",
        "<|begin_tool_result|>\n{{ c }}\n", "{{ c }}", prompt="<|begin_assistant|>\n"), "<|end|>",
        "\n<|begin_tool_result|>\n42\n<|begin_assistant|>\n", "\n<|begin_user|>\nAgain\n<|begin_assistant|>\n"),
}  # fmt: skip
