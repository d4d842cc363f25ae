"""One cell in its own process: decode and prefill speed of transformers; prints one JSON line.

Runs in an environment with the extra `peers`; imports nothing of kvjax.
"""

import json
import pathlib
import statistics
import sys
import time

import torch
import transformers


class Clock(transformers.LogitsProcessor):
    """Reads the clock at every step of `generate`."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores):
        """Note the time; leave the scores alone."""
        self.times.append(time.perf_counter())
        return scores


def main() -> None:
    """Read the cell from standard input."""
    cell = json.load(sys.stdin)
    torch.set_num_threads(cell["threads"])
    path = pathlib.Path(cell["gguf"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, cell["dtype"])
    ).eval()
    kind = cell["cache"]
    if kind == "static-compiled":
        model.forward = torch.compile(model.forward)
    prompts = torch.tensor(cell["prompts"])
    B, P = prompts.shape
    options = {
        "max_new_tokens": cell["new_tokens"],
        "min_new_tokens": cell["new_tokens"],
        "do_sample": False,
        "cache_implementation": "dynamic" if kind == "dynamic" else "static",
        "attention_mask": torch.ones_like(prompts),
        "pad_token_id": 2,
        "disable_compile": True,
    }
    steps, prefills = [], []
    with torch.inference_mode():
        for repetition in range(cell["repetitions"] + 1):
            clock = Clock()
            start = time.perf_counter()
            output = model.generate(
                prompts, logits_processor=transformers.LogitsProcessorList([clock]), **options
            )
            if repetition:  # the first warms up
                prefills.append(clock.times[0] - start)
                steps += [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    print(
        json.dumps(
            {
                "decode": B / statistics.median(steps),
                "prefill": B * P / statistics.median(prefills),
                "tokens": output[:, P : P + 8].tolist(),
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            }
        )
    )


if __name__ == "__main__":
    main()
