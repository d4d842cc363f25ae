"""One cell in its own process: decode and prefill speed of llama.cpp; prints one JSON line.

Runs in an environment with llama-cpp-python; imports nothing of kvjax. The weights are re-encoded
from the same file by llama.cpp's own quantizer, so that all peers hold the same values.
"""

import ctypes
import json
import os
import statistics
import sys
import time

import llama_cpp
import numpy as np

FILE_TYPES = {"float32": 0, "bfloat16": 32}  # LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_BF16


def main() -> None:
    """Read the cell from standard input."""
    cell = json.load(sys.stdin)
    llama_cpp.llama_backend_init()
    path = os.path.join(cell["scratch"], f"weights-{cell['dtype']}.gguf")
    if not os.path.exists(path):
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = FILE_TYPES[cell["dtype"]], True
        llama_cpp.llama_model_quantize(
            cell["gguf"].encode(), path.encode(), ctypes.byref(parameters)
        )
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    prompts = np.array(cell["prompts"], np.int32)
    B, P = prompts.shape
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = B * (P + cell["new_tokens"] + 8)
    options.n_batch = options.n_ubatch = 512
    options.n_seq_max, options.n_threads = B, cell["threads"]
    options.n_threads_batch = cell["threads"]
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    prefills, steps = [], []
    for repetition in range(cell["repetitions"] + 1):
        context = llama_cpp.llama_init_from_model(model, options)
        start = time.perf_counter()
        last = [prefill(context, row, b) for b, row in enumerate(prompts)]
        seconds = time.perf_counter() - start
        tokens, times, first = np.array([_argmax(x) for x in last]), [], []
        for step in range(cell["new_tokens"]):
            first.append(tokens)
            begin = time.perf_counter()
            tokens = decode(context, tokens, P + step, vocabulary)
            times.append(time.perf_counter() - begin)
        llama_cpp.llama_free(context)
        if repetition:
            prefills.append(seconds)
            steps += times
    print(
        json.dumps(
            {
                "decode": B / statistics.median(steps),
                "prefill": B * P / statistics.median(prefills),
                "tokens": np.array(first[:8]).T.tolist(),
                "versions": {"llama-cpp-python": llama_cpp.__version__},
            }
        )
    )


def _argmax(logits: np.ndarray) -> int:
    return int(np.argmax(logits))


def run(context, tokens, positions, sequences, wanted) -> None:
    """Decode one batch of tokens."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    rows = zip(tokens, positions, sequences, wanted, strict=True)
    for i, (token, position, sequence, want) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), int(position), 1
        batch.seq_id[i][0], batch.logits[i] = int(sequence), int(want)
    if llama_cpp.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    llama_cpp.llama_batch_free(batch)


def prefill(context, row: np.ndarray, sequence: int) -> np.ndarray:
    """Feed a prompt; returns the logits after its last token."""
    model = llama_cpp.llama_get_model(context)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for start in range(0, len(row), 512):
        piece = row[start : start + 512]
        n = len(piece)
        wanted = [0] * (n - 1) + [1]
        run(context, piece, range(start, start + n), [sequence] * n, wanted)
    logits = llama_cpp.llama_get_logits_ith(context, -1)
    return np.ctypeslib.as_array(logits, (vocabulary,)).copy()


def decode(context, tokens: np.ndarray, position: int, vocabulary: int) -> np.ndarray:
    """One step of all sequences; returns the likeliest next tokens."""
    B = len(tokens)
    run(context, tokens, [position] * B, range(B), [1] * B)
    rows = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, b), (vocabulary,))
        for b in range(B)
    ]
    return np.array([_argmax(row) for row in rows])


if __name__ == "__main__":
    main()
