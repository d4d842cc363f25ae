"""One cell in its own process: decode and prefill speed of kvjax; prints one JSON line."""

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import kvjax
from kvjax.decode.generate import LoopState, generate_loop
from kvjax.decode.prefill import prefill
from kvjax.decode.sampling import Sampler, Sampling

BLOCK = 16  # decode steps between two looks at the clock


def main() -> None:
    """Read the cell from standard input."""
    cell = json.load(sys.stdin)
    lm = kvjax.load(cell["model"], dtype=cell["dtype"])
    prompts, new = cell["prompts"], cell["new_tokens"]
    B, P = len(prompts), len(prompts[0])
    config = kvjax.CacheConfig()

    def fill():
        cache = config.init(lm.dims, B, P + new)
        start = time.perf_counter()
        logits, cache = prefill(lm.model, lm.params, cache, prompts)
        jax.block_until_ready((logits, cache))
        return time.perf_counter() - start, logits, cache

    first, *_ = fill()
    prefills = []
    for _ in range(cell["repetitions"]):
        seconds, logits, cache = fill()
        prefills.append(seconds)
    state = LoopState.after_prefill(cache, logits, new)
    sampler = Sampler.of([Sampling()] * B)
    stops = jnp.full((B, 4), -1, jnp.int32)
    limit = jnp.full(B, new + 1, jnp.int32)
    blocks = []
    for until in range(BLOCK, new + 1, BLOCK):
        begin = time.perf_counter()
        state = generate_loop(lm.model, lm.params, state, sampler, stops, limit, jnp.int32(until))
        jax.block_until_ready(state)
        blocks.append(time.perf_counter() - begin)
    step = statistics.median(blocks[1:]) / BLOCK
    print(
        json.dumps(
            {
                "decode": B / step,
                "prefill": B * P / statistics.median(prefills),
                "compile_s": first - statistics.median(prefills) + blocks[0] - step * BLOCK,
                "tokens": jax.device_get(state.tokens)[:, :8].tolist(),
                "versions": {"jax": jax.__version__, "kvjax": kvjax.__version__},
            }
        )
    )


if __name__ == "__main__":
    main()
