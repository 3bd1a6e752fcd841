"""Types and ranges of what a client sends to the rollout server, checked before the engine gets it.

vLLM checks some of them only within a step, where an exception would be the failure of every running request.
"""

import reprlib
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, ValidationError

INT32, INT64 = 2**31 - 1, 2**63 - 1  # the largest


class Body(BaseModel, strict=True, extra="allow"):
    """The fields of a request that the server reads; others are ignored."""

    rid: str | None = None
    input_ids: list | None = None  # checked by check_token_ids
    sampling_params: dict[str, Any] | None = None  # checked by SamplingFields
    return_logprob: bool | None = None
    return_kept_tokens: bool | None = None
    abort_all: bool | None = None
    abort_all_requests: bool | None = None
    model_path: str | None = None
    weight_version: str | None = None
    mode: Literal["abort", "retract", "in_place"] | None = None
    tags: list[Literal["weights", "kv_cache"]] | None = None


class SamplingFields(BaseModel, strict=True, extra="forbid", allow_inf_nan=False):
    """The fields of `sampling_params`, under vLLM's names; three may have SGLang's instead."""

    temperature: float | None = Field(None, ge=0, le=1e4)
    top_p: float | None = Field(None, ge=1e-6, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    max_tokens: int | None = Field(None, ge=1, le=INT64, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))
    min_tokens: int | None = Field(None, ge=0, le=INT32, validation_alias=AliasChoices("min_tokens", "min_new_tokens"))
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32)]] | None = None
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, validation_alias=AliasChoices("seed", "sampling_seed"))
    ignore_eos: bool | None = None


def checked_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request without the fields that are null; ValueError for a field of another type."""
    try:
        body = Body.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise ValueError(_first_problem(error)) from None
    return {name: value for name, value in body if value is not None}


def sampling_arguments(given: dict[str, Any], room: int, vocab_size: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams from `sampling_params`, for an answer of at most `room` tokens.

    Stop ids that the vocabulary does not have are left out: no answer contains them. ValueError names what is unknown,
    has another type or is out of range.
    """
    try:
        fields = SamplingFields.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ValueError(_first_problem(error, "sampling_params")) from None
    named = {name: value for name, value in fields if value is not None}
    # vLLM's own ignore_eos does not apply to stop ids.
    stops = [] if fields.ignore_eos else [token for token in fields.stop_token_ids or () if token < vocab_size]
    if fields.min_tokens and len(set(stops)) == vocab_size:
        rule = f"sampling_params.min_new_tokens={fields.min_tokens}, but stop_token_ids has all {vocab_size} ids"
        raise ValueError(f"{rule}: no token is left to generate. Leave ids out of it, or set ignore_eos")
    limit = min(fields.max_tokens or room, room)
    return named | {"max_tokens": limit, "ignore_eos": bool(fields.ignore_eos), "stop_token_ids": stops}


def _first_problem(error: ValidationError, *where: str) -> str:
    """pydantic's first finding, such as "sampling_params.top_k=-2: Input should be greater than or equal to -1"."""
    first = error.errors(include_url=False)[0]
    key = ".".join([*where, *map(str, first["loc"])]) or "the body"
    if first["type"] == "extra_forbidden":
        known = f"known are: {', '.join(SamplingFields.model_fields)}"
        return f"{key} is unknown, or another name of a parameter that is given, too; {known}"
    return f"{key}={reprlib.repr(first['input'])}: {first['msg']}"
