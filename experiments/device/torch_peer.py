"""PyTorch's attention over the same shapes, in a process of its own so that its memory is freed.

Reads JSON from standard input, writes a JSON object a line; imports nothing of kvjax.
"""

import json
import statistics
import sys
import time


def main() -> int:
    """Time every shape until the time is over."""
    job = json.load(sys.stdin)
    end = time.monotonic() + job["seconds"]
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"refused": f"{error}"}))
        return 0
    if not torch.cuda.is_available():
        print(json.dumps({"refused": f"PyTorch {torch.__version__} sees no CUDA device"}))
        return 0
    print(json.dumps({"version": torch.__version__}))
    for shape in job["shapes"]:
        if time.monotonic() > end:
            print(json.dumps({**shape, "error": "no time left"}))
            continue
        try:
            row = {"seconds": time_shape(torch, job, **shape)}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({**shape, **row}), flush=True)
        torch.cuda.empty_cache()
    return 0


def time_shape(torch, job: dict, B: int, T: int, S: int, copies: int) -> list[float]:
    """Seconds of one call in each repetition."""
    N, K, H = job["N"], job["K"], job["H"]
    options = dict(device="cuda", dtype=torch.bfloat16)
    query = torch.randn(B, N, T, H, **options)
    stores = [
        (torch.randn(B, K, S, H, **options), torch.randn(B, K, S, H, **options))
        for _ in range(copies)
    ]
    mask = None
    if T > 1:
        slots = torch.arange(S, device="cuda")
        mask = slots[None] <= slots[S - T :, None]
    attend = torch.nn.functional.scaled_dot_product_attention

    def round_trip(rounds: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for k, v in stores:
                attend(query, k, v, attn_mask=mask, enable_gqa=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / (rounds * copies)

    with torch.no_grad():
        round_trip(1)
        once = round_trip(1) * copies
        rounds = max(1, min(1000, int(job["least"] / max(once, 1e-7))))
        repetitions = max(3, min(20, int(0.25 / max(rounds * once, 1e-7))))
        taken = [round_trip(rounds) for _ in range(repetitions)]
    assert statistics.median(taken) > 0
    return taken


if __name__ == "__main__":
    sys.exit(main())
