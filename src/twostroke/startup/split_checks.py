"""What cannot be computed by several ranks, refused before a weight is read."""

from __future__ import annotations

import math

from twostroke.config.engine import EngineConfig
from twostroke.config.model import ModelConfig
from twostroke.errors import InvalidParameter
from twostroke.kernels.dispatch import Operators
from twostroke.model.registry import architecture


def check_can_split(config: EngineConfig, model: ModelConfig, operators: Operators) -> None:
    """Refuses what would not give the bits of one rank, or is not implemented.

    Raises:
        InvalidParameter: tensor_parallel_size does not go with the model or with another setting.
    """
    size = config.load.tensor_parallel_size
    if size == 1:
        return

    def refuse(limit: str, remedy: str) -> None:
        raise InvalidParameter("tensor_parallel_size", size, limit, remedy)

    num_heads = math.gcd(*(layer.num_heads for layer in model.kinds))
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    sizes = [n for n in divisors if all(spec.can_deal(n) for spec in model.kv_specs)]
    if size not in sizes:
        kv_heads = " or ".join(str(n) for n in sorted({spec.num_kv_heads for spec in model.kv_specs}))
        refuse(
            f"must divide the {num_heads} query heads of the model, and divide its {kv_heads} KV heads or be a "
            "multiple of them",
            f"Take one of {', '.join(map(str, sizes))}.",
        )
    if not architecture(model.architecture).can_split:
        refuse(f"{model.architecture} is not written for a share of its heads", "Leave it out.")
    if operators.name == "reference":
        refuse(
            f"with kernels=reference and {model.dtype}, bits may depend on a matrix's number of rows",
            "Take the native kernels (--kernels auto, --dtype float32 or bfloat16), or leave it out.",
        )
    speculation = config.speculative_config
    if speculation is not None and speculation.method != "ngram":
        refuse(f"the drafts of {speculation.method} come from one rank so far", 'Take "ngram", or leave one out.')
    if config.cache.kv_check_rate:
        refuse(
            f"kv_check_rate={config.cache.kv_check_rate}: a cached block is compared on one rank so far",
            "Leave one of them out.",
        )
