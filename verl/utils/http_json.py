"""POST of JSON with a bounded answer."""

import json
from typing import Any

import aiohttp
import tenacity

MAX_RESPONSE_BYTES = 4 << 20
_BUSY = (429, 500, 502, 503, 504)


class ServiceError(RuntimeError):
    """A service refused a request, or answered something else than JSON."""


class ServiceBusy(ServiceError):
    """A service failed to answer a request that may succeed later."""


async def request_json(session: aiohttp.ClientSession, url: str, body: Any, max_bytes: int = MAX_RESPONSE_BYTES) -> Any:
    """The decoded answer of one request.

    Raises ServiceBusy where it may succeed later, ServiceError where the service refuses it, or where the answer is not
    JSON or longer than `max_bytes`: reading stops there.
    """
    async with session.post(url, json=body) as response:
        content = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            content += chunk
            if len(content) > max_bytes:
                raise ServiceError(f"{url} answered more than {max_bytes} bytes")
    shown = bytes(content[:200]).decode(errors="replace")
    if response.status != 200:
        kind = ServiceBusy if response.status in _BUSY else ServiceError
        raise kind(f"{url} answered {response.status}: {shown}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"{url} answered no JSON: {shown}") from error


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((ServiceBusy, aiohttp.ClientConnectionError)),
    stop=tenacity.stop_after_attempt(4), wait=tenacity.wait_exponential_jitter(0.2, max=5, jitter=0.2), reraise=True,
)  # fmt: skip
async def post_json(url: str, body: Any, timeout: float, max_bytes: int = MAX_RESPONSE_BYTES) -> Any:
    """`request_json`; a busy or unreachable service is asked up to four times, each for `timeout` seconds."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout), trust_env=False) as session:
        return await request_json(session, url, body, max_bytes)
