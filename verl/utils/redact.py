"""Removes secrets from what is printed, logged or stored."""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

HIDDEN = "<redacted>"
# A name is secret because of one of its words. "token" and "key" also occur in harmless names (max_token_len,
# prompt_key, tokenizer), so "token" counts only at the end, and *_key only for known kinds.
_SECRET_NAME = re.compile(
    r"(?i)(secret|passw(or)?d|passphrase|credential|authorization|bearer|private_?key|access_?key|api_?key|auth_?key"
    r"|(^|[_\-.])token$|(^|[_\-.])(auth|access|hf|hub|api|server|wandb)_?(key|token)s?$|^key$|^cookie$)"
)
_URL_CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.\-]*://)[^/\s@]+@")
_QUERY_SECRET = re.compile(r"(?i)(?P<name>[?&](?:[\w\-]*(?:token|key|secret|password|signature))=)[^&\s#]+")
_ASSIGNED_SECRET = re.compile(
    r"(?i)(?P<name>\b[\w\-.]*(?:api_?key|secret|passw(?:or)?d|(?:hf|access|auth|hub|api|server)_?token)[\w\-]*['\"]?\s*[=:]\s*)"
    r"(?P<quote>['\"]?)[^\s'\",}\]]+(?P=quote)"
)


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a secret."""
    return bool(_SECRET_NAME.search(str(name)))


def redact_text(text: str) -> str:
    """The text without credentials in URLs and without values assigned to secret names."""
    text = _URL_CREDENTIALS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _QUERY_SECRET.sub(rf"\g<name>{HIDDEN}", text)
    return _ASSIGNED_SECRET.sub(rf"\g<name>{HIDDEN}", text)


def redact(value: Any) -> Any:
    """A copy of plain data or of a config with secrets replaced, by name at any depth and in texts.

    All values of a mapping named env_vars are hidden: any variable may be a secret.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return {k: _redact_entry(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(v) for v in value)
    return redact_text(value) if isinstance(value, str) else value


def redacted_yaml(config: Any) -> str:
    """A config as YAML, interpolations resolved where they can be, without secrets."""
    node = OmegaConf.create(config) if not OmegaConf.is_config(config) else config
    plain = OmegaConf.to_container(node, resolve=not OmegaConf.missing_keys(node))
    return OmegaConf.to_yaml(OmegaConf.create(redact(plain)))


def _redact_entry(name: str, value: Any) -> Any:
    if name in ("env_vars", "environment") and isinstance(value, Mapping):
        return {k: HIDDEN for k in value}
    if is_secret_name(name) and not isinstance(value, Mapping) and value not in (None, "", False, True):
        return HIDDEN
    return redact(value)
