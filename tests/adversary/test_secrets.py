"""Names and texts that hold a secret, as settings, options, variables, headers, JSON and tracebacks show them."""

import json
import shlex

import pytest
from omegaconf import OmegaConf

from verl.trainer.run.starts import changed_settings
from verl.utils.redact import HIDDEN, is_secret_name, redact, redact_command, redact_text, redacted_yaml

SECRET_NAMES = [
    "key", "KEY", "keys", "token", "Token", "tokens", "hf_tokens", "auth", "basic_auth", "pwd", "db_pwd", "passwd",
    "password", "passphrase", "ssh_passphrase", "bearer", "bearer_token", "cookie", "session-cookie", "Set-Cookie",
    "access_key", "access-key", "accessKey", "AccessKey", "ACCESS_KEY", "aws_access_key_id", "AWS_SECRET_ACCESS_KEY",
    "private_key", "privateKey", "private-key", "api_key", "apiKey", "APIKEY", "X-Api-Key", "x_api_key", "openai_key",
    "OPENAI_API_KEY", "wandb_key", "anthropic-key", "server_key", "client_secret", "clientSecret", "secrets",
    "credential", "credentials", "gcp_credentials", "authorization", "Proxy-Authorization", "HF_TOKEN", "hubToken",
    "auth_token", "authToken", "api_keys", "credentials.user", "reward_kwargs.credentials.name", "a.token.b",
]  # fmt: skip
HARMLESS_NAMES = [
    "prompt_key", "response_key", "reward_fn_key", "image_key", "messages_key", "tools_key", "enable_thinking_key",
    "max_tokens", "num_tokens", "max_num_batched_tokens", "stop_token_ids", "tokenizer", "token2text", "author",
    "max_token_len_per_gpu", "monkey", "keyboard", "num_key_value_heads", "estimated_tokens_per_request", "hockey", "",
    "max_new_tokens", "rollout_token_veto_threshold", "passed", "path", "custom_cls.name", "keyed", "authors",
]  # fmt: skip
# `hush` must not remain, and what follows must.
TEXTS = [
    ("key=hush", "key="), ("api_key=hush, n=1", "n=1"), ("access_key: hush", "access_key"), ("private_key=hush", ""),
    ("passphrase='hush hush'", ""), ('password="hush, hush" n=1', "n=1"), ("pwd=hush;host=h", "host=h"),
    ("auth=hush", ""), ("token=hush&b=2", "b=2"), ("tokens=[hush,hush, hush] n=1", "n=1"),
    ("Bearer hushhush1", "Bearer"), ('api_keys=[\'hush\', "hush"], n=1', "n=1"),
    ("Authorization: Bearer hush\nn=1", "n=1"), ("X-Api-Key: hush", ""),
    ("Authorization: Basic hush==", "Authorization"), ("Cookie: a=hush; b=hush\nHost: h", "Host: h"),
    ("openai_key=hush", ""),
    ("{'credentials': {'user': 'hush', 'more': {'x': 'hush'}, 'y': 'hush'}, 'n': 1}", "'n': 1"),
    ('{"token": "hush", "n": 1}', '"n": 1'), ('{\\"token\\": \\"hush\\", \\"n\\": 1}', "n"),
    ("--token hush --n 1", "--n 1"), ("--api-key=hush --n 1", "--n 1"), ("-H 'X-Api-Key: hush' --n 1", "--n 1"),
    ("+reward_kwargs.token=hush n=1", "n=1"), ("url=http://u:hush@h:1/v1?n=1", "h:1/v1?n=1"),
    ("http://u:p@hush@h/v1", "h/v1"), ("socks5://hush@h", "@h"),
    ("https://h/a?sig=1&X-Amz-Signature=hush&b=2", "b=2"), ("https://h/a?access_token=hush#f", "#f"),
    ("reward_kwargs.credentials.user=hush", ""), ("Client(api_key='hush', n=1)", "n=1"), ("TOKEN = 'hush'", "TOKEN"),
    ("Client(secret=b'hush')", "Client"),
    ("-----BEGIN RSA PRIVATE KEY-----\nhush\n-----END RSA PRIVATE KEY----- n", "n"),
    ("token: hushhushhush1", "token"), ("passwd:hush", ""), ("client_secret := hush", ""),
    ("credentials=(hush, hush) n", "n"),
    ("--reward_kwargs.password=my hush n=1", "n=1"), ("password=my own hush --n 1", "--n 1"),
    ("--pwd my hush -n", "-n"), ("reward_kwargs.password=my hush\nn=1", "n=1"), ("password=my hush, n", ", n"),
    ("f(password=a if hush)", ")"), ("http://u:p/hush@h:1/v1", "h:1/v1"), ("postgres://u:a/hush/b@h/d?n=1", "h/d?n=1"),
    ("http://h:80/v1,http://u:hush@h2/v1", "h2/v1"), ("http://u:hush@h/v1,http://u:hush@h2/v1", "h2/v1"),
    ("https://h/a?se=1&sig=hush%2F1&b=2", "b=2"), ("https://h/a?Sig=hush", "https://h/a"),
    ("got sk-proj-hush1234567890abc.", "got"), ("sk-ant-api03-hush-1234567890", ""),
    ("hf_hushABCDEFGHIJKLMNOPQRST, n", "n"), ("ghp_hush567890123456789012345678901234567890", ""),
    ("github_pat_11AAAAAAAAAAAAAAA_hush0123", ""),
    ("glpat-hush5678901234567890", ""), ("xoxb-hush-123456789-abcdef", ""), ("nvapi-hush56789012345678", ""),
    ("['--api-key', 'hush', '--n', '1']", "'--n'"), ("x eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.hush y", "y"),
]  # fmt: skip
KEPT = [
    "http://host:8000/v1", "max_token_len=3, prompt_key=prompt", "a@b.c wrote key: value", "unknown token: 42",
    "the key: an id", "auth: none", "x" * 50_000, "a bearer of news", "d[key] == 5", "Traceback: line 5", "a=1",
    "http://h:8000/v1/@scope/name", "https://h/package@1.2/file", "http://[::1]:8000/a@b",
    "hf_tokenizer_of_a_long_name", "http://a:" + "/" * 50_000, "sk-learn-based-estimators-of-the-user",
    "task-1234567890-abcdefgh", "file:///a:b/c@d", "a design=1 of two words",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_everything_below_a_secret_name_is_hidden_everywhere(name):
    assert is_secret_name(name)
    tree = {"kwargs": {name: ["hush", "hush"], "n": 1}, "more": [{name: {"user": "hush"}}], "empty": {name: None}}
    clean = redact(tree)
    assert clean["kwargs"] == {name: HIDDEN, "n": 1} and clean["more"] == [{name: HIDDEN}]
    assert clean["empty"] == {name: None}
    assert "hush" not in redacted_yaml(OmegaConf.create(tree)) + redact_text(f"{name}=hush {name}='hush'")
    command = shlex.join(redact_command(["python", f"+reward.{name}=hush hush", f"--{name}", "hush", "n=1"]))
    assert "hush" not in command and command.endswith("n=1")
    old, new = (OmegaConf.create(redact({"a": {name: value}})) for value in ("hush1", "hush2"))
    assert "hush" not in json.dumps(changed_settings(old, new, {}))


def test_a_list_is_read_as_a_command_line():
    tree = {"server_args": ["--api-key", "hush", "--n", "1"], "pair": ("a", "b"), "mixed": [1, "token=hush"]}
    clean = {"server_args": ["--api-key", HIDDEN, "--n", "1"], "pair": ("a", "b"), "mixed": [1, f"token={HIDDEN}"]}
    assert redact(tree) == clean


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_harmless_names_stay(name):
    assert not is_secret_name(name)
    assert redact({name: "shown"}) == {name: "shown"} and redact_text(f"{name}=shown") == f"{name}=shown"
    assert redact_command([f"a.{name}=shown"]) == [f"a.{name}=shown"]


@pytest.mark.parametrize(("text", "kept"), TEXTS)
def test_no_secret_stays_in_a_text(text, kept):
    clean = redact_text(text)
    assert "hush" not in clean and HIDDEN in clean and kept in clean


@pytest.mark.parametrize("text", KEPT, ids=lambda text: text[:20])
def test_texts_without_secrets_stay(text):
    assert redact_text(text) == text
