"""Whether this kernel grants the sandbox's confinement, asked once."""

import functools
import warnings

import pytest

from verl.reward.sandbox import SandboxConfig, SandboxUnavailable, run_python


@functools.cache
def why_not() -> str | None:
    """None, or the sentence with which the product refuses to run programs here."""
    try:
        run_python("")
    except SandboxUnavailable as refusal:
        return str(refusal)
    return None


def refused(request: pytest.FixtureRequest) -> bool:
    """Where the kernel forbids the confinement: the product must refuse, and the test's report names it."""
    if why_not() is None:
        return False
    with pytest.raises(SandboxUnavailable, match="cannot confine"):
        run_python("", limits=SandboxConfig(unconfined=False))
    warnings.warn(f"{request.node.name}: not tried, the product refuses to run here: {why_not()}", stacklevel=2)
    return True
