"""The decoder of rollouts on workers, small and with exact numerics."""

import dataclasses

from tests.models import tiny_decoders as tiny

DECODER = dataclasses.replace(tiny.llama(), numerics="exact")
