"""Removes secrets from what is printed, logged or stored."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

HIDDEN = "<redacted>"
_SECRET_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials",
    "authorization", "bearer", "cookie", "cookies", "apikey", "apikeys", "privatekey", "accesskey", "authtoken",
}  # fmt: skip
# Last words that are secret, and the words before them with which they are not (prompt_key, max_tokens).
_LAST_WORDS = {
    "auth": set(), "token": {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "dp", "noise"},
    "key": {"prompt", "response", "answer", "question", "messages", "message", "tools", "image", "images", "video",
            "videos", "audio", "fn", "thinking", "label", "text", "input", "output", "target", "column", "data",
            "source", "sort", "dict", "group", "cache", "index", "config", "state", "metric", "truth", "model"},
    "tokens": {"num", "max", "min", "new", "total", "batched", "draft", "drafted", "accepted", "prompt", "response",
               "completion", "generated", "input", "output", "stop", "special", "pad", "added", "valid", "estimated"},
}  # fmt: skip
_LAST_WORDS["keys"] = _LAST_WORDS["key"]
_IN_PROSE = {*_LAST_WORDS}  # alone before a colon they are often words of a sentence
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Up to the last @ before a slash; else a password with a slash, up to the first @, unless the slash ends a port.
_URL_CREDENTIALS = re.compile(
    r"(?<![\w+.\-])(?P<scheme>[a-zA-Z][a-zA-Z0-9+.\-]*://)(?:[^/\s]+@|[^/\s:@\[]*:(?!\d{1,5}/)[^\s@]+@)"
)
_SIGNED = re.compile(r"(?i)(?P<name>[?&](?:[\w\-]*signature|sig)=)[^&\s#]+")
# Keys of services are known by how they begin.
_SERVICE_KEY = re.compile(
    r"(?<![\w\-])(?:sk[-_](?=[\w\-]*\d)[\w\-]{16,}|(?:hf|gsk|r8|gh[opsur])_[a-zA-Z0-9]{20,}|github_pat_\w{20,}"
    r"|(?:glpat|nvapi|xox[a-z])-[\w\-]{16,}|AKIA[A-Z0-9]{16}|AIza[\w\-]{35}|eyJ[\w\-]{8,}\.eyJ[\w\-]{8,}\.[\w\-]+)"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_SCHEME = re.compile(r"(?i)(?P<name>\b(?:bearer|basic)\s+)[\w.~+/\-]{8,}=*")
# The name before a value: `name=`, `name: `, `"name": `, `name := `; after a dash (flag) also `--name ` or, in a list
# of quoted arguments, `"--name", `.
_ASSIGNED = re.compile(
    r"(?<![\w.\-])(?P<flag>--?)?(?P<name>\w[\w.\-]*)(?P<quote>\\*['\"])?(?P<sign>\s*(?::=|[=:])\s*"
    r"|(?(flag)(?:\s+|(?(quote)\s*,\s*|(?!)))|(?!)))"
)
_QUOTED = re.compile(r"[bBrRfFuU]{0,2}\\*(['\"])(?:\\.|(?!\1).)*\1?", re.DOTALL)
_BARE = re.compile(r"[^\s'\",;&#)}\]]+")
_BARE_WORDS = re.compile(rf"{_BARE.pattern}(?:[ \t]+(?![+\-~]|[\w.\-]+\s*[=:]){_BARE.pattern})*")
_LINE = re.compile(r"[^\r\n'\"]+")
_OPEN, _CLOSE = "[{(", "]})"


def is_secret_name(name: str) -> bool:
    """Whether a key, variable, option or header of this name holds a secret; a dotted name: one of its parts does."""
    return any(_is_secret_part(part) for part in str(name).split("."))


def _is_secret_part(part: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(part)]
    if not words:
        return False
    pairs = {first + second for first, second in zip(words, words[1:], strict=False)}
    harmless = _LAST_WORDS.get(words[-1])
    return bool(_SECRET_WORDS & {*words, *pairs}) or harmless is not None and not harmless & set(words[:-1])


def redact_text(text: str) -> str:
    """The text without credentials in URLs and headers, keys of services, and the values of secret names.

    An unquoted value of an option, or after a = without spaces, ends before the next option, assignment or delimiter.
    """
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _URL_CREDENTIALS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _SERVICE_KEY.sub(HIDDEN, _SIGNED.sub(rf"\g<name>{HIDDEN}", text))
    parts, position = [], 0
    while match := _ASSIGNED.search(text, position):
        end = _end_of_value(text, match) if is_secret_name(match["name"]) else match.end()
        parts.append(text[position : match.end()] + (HIDDEN if end > match.end() else ""))
        position = end
    return _SCHEME.sub(rf"\g<name>{HIDDEN}", "".join(parts) + text[position:])


def _end_of_value(text: str, match: re.Match) -> int:
    """Where the value after a secret name ends: that of a quoted text, list, mapping, header or word."""
    start, name = match.end(), match["name"].lower()
    if text[start : start + 1] in tuple(_OPEN):
        depth = 0
        for end in range(start, len(text)):
            depth += (text[end] in _OPEN) - (text[end] in _CLOSE)
            if depth == 0:
                return end + 1
        return len(text)
    if quoted := _QUOTED.match(text, start):
        return quoted.end()
    is_colon = match["sign"].strip() == ":"
    kind = _BARE_WORDS if match["flag"] or match["sign"] == "=" else _BARE
    if is_colon and name in ("authorization", "cookie", "set-cookie", "proxy-authorization"):
        kind = _LINE
    value = kind.match(text, start)
    if value is None or is_colon and not match["quote"] and name in _IN_PROSE and len(value[0]) < 12:
        return start
    return value.end()


def redact_command(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets: values of `name=value`, and of options that the next argument gives."""
    shown, hides_next = [], False
    for argument in arguments:
        name, is_assigned, _ = argument.partition("=")
        is_secret = is_secret_name(name.lstrip("+-~")) and " " not in name
        visible = f"{name}={HIDDEN}" if is_secret and is_assigned else redact_text(argument)
        shown.append(HIDDEN if hides_next else visible)
        hides_next = is_secret and argument.startswith("-") and not is_assigned
    return shown


def redact(value: Any) -> Any:
    """A copy of plain data or of a config with secrets replaced, by name at any depth and in texts.

    Of a secret name everything below is hidden, and all values of a mapping named env_vars: any may be a secret.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return {k: _redact_entry(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):  # may be a command line
        return type(value)(redact_command(value))
    if isinstance(value, list | tuple):
        return type(value)(redact(v) for v in value)
    return redact_text(value) if isinstance(value, str) else value


def redacted_yaml(config: Any) -> str:
    """A config as YAML, interpolations resolved where they can be, without secrets."""
    node = OmegaConf.create(config) if not OmegaConf.is_config(config) else config
    plain = OmegaConf.to_container(node, resolve=not OmegaConf.missing_keys(node))
    return OmegaConf.to_yaml(OmegaConf.create(redact(plain)))


def _redact_entry(name: str, value: Any) -> Any:
    if name == "env_vars" and isinstance(value, Mapping):
        return {k: HIDDEN for k in value}
    if name == "environment" and isinstance(value, Mapping):  # of a process, or the section data.environment
        return {k: HIDDEN if str(k).isupper() else _redact_entry(str(k), v) for k, v in value.items()}
    if is_secret_name(name) and value is not None and not isinstance(value, bool) and value not in ("", [], {}, ()):
        return HIDDEN
    return redact(value)
