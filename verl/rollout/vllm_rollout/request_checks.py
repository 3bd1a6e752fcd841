"""Types and ranges of what a client sends to the rollout server, checked before the engine gets it.

vLLM checks some of them only within a step, where an exception would be the failure of every running request.
"""

import json
import reprlib
from typing import Any

# A request's sampling parameters: type, least and largest value.
SAMPLING: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 1e4),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, -1, 2**31 - 1),
    "repetition_penalty": (float, 0.01, 100.0),
    "max_tokens": (int, 1, 2**63 - 1),
    "min_tokens": (int, 0, 2**31 - 1),
    "stop_token_ids": (list, 0, 2**31 - 1),
    "seed": (int, -(2**63), 2**63 - 1),
}
# Names of SGLang that POST /generate accepts too.
ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
# The other fields that the server reads: their type, or the values that they may have.
FIELDS: dict[str, type | tuple[str, ...]] = {
    "rid": str, "input_ids": list, "sampling_params": dict, "return_logprob": bool, "return_kept_tokens": bool,
    "abort_all": bool, "abort_all_requests": bool, "model_path": str, "weight_version": str,
    "mode": ("abort", "retract", "in_place"), "tags": list,
}  # fmt: skip
TAGS = ("weights", "kv_cache")
_NAMES = {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "an integer", float: "a number"}


def checked_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request without the fields that are null; ValueError for a field of another type."""
    try:
        body = json.loads(raw or b"{}")
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name, wanted in FIELDS.items():
        value = body.get(name)
        if isinstance(wanted, tuple) and name in body and value not in wanted:
            raise ValueError(f"{name}={reprlib.repr(value)} must be one of {', '.join(wanted)}")
        if isinstance(wanted, type) and name in body and type(value) is not wanted:
            raise ValueError(f"{name}={reprlib.repr(value)} must be {_NAMES[wanted]}")
    if any(tag not in TAGS for tag in body.get("tags", ())):
        raise ValueError(f"tags={reprlib.repr(body['tags'])} may contain {' and '.join(TAGS)} only")
    return body


def sampling_arguments(given: dict[str, Any], room: int, vocab_size: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams from `sampling_params`, for an answer of at most `room` tokens.

    Stop ids that the vocabulary does not have are left out: no answer contains them. ValueError names what is unknown,
    has another type or is out of range.
    """
    if unknown := sorted(set(given) - {*SAMPLING, *ALIASES, "ignore_eos"}):
        raise ValueError(f"sampling_params has {', '.join(unknown)}; known are: {', '.join(SAMPLING)}, ignore_eos")
    ignore_eos = given.get("ignore_eos")
    if ignore_eos is not None and type(ignore_eos) is not bool:
        raise ValueError(f"sampling_params.ignore_eos={reprlib.repr(ignore_eos)} must be true or false")
    named: dict[str, Any] = {"ignore_eos": bool(ignore_eos)}
    for name, value in given.items():
        if value is None or name == "ignore_eos":
            continue
        kind, low, high = SAMPLING[ALIASES.get(name, name)]
        numbers = (int, float) if kind is float else (int,)
        values = value if type(value) is list else [value]
        right_kind = (type(value) is list) == (kind is list) and all(type(v) in numbers for v in values)
        if not right_kind or not all(low <= v <= high for v in values):
            what = "a list of integers" if kind is list else _NAMES[kind]
            raise ValueError(f"sampling_params.{name}={reprlib.repr(value)} must be {what} from {low} to {high}")
        named[ALIASES.get(name, name)] = value
    named["max_tokens"] = min(named.get("max_tokens", room), room)
    # vLLM's own ignore_eos does not apply to stop ids.
    stops = [] if ignore_eos else [token for token in named.get("stop_token_ids", ()) if token < vocab_size]
    if named.get("min_tokens") and len(set(stops)) == vocab_size:
        rule = f"sampling_params.min_new_tokens={named['min_tokens']}, but stop_token_ids has all {vocab_size} ids"
        raise ValueError(f"{rule}: no token is left to generate. Leave ids out of it, or set ignore_eos")
    return named | {"stop_token_ids": stops}
