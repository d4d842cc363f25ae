"""Decode: chunked prefill, jitted steps with the cache donated, generation on the device."""

from kvjax.decode.generate import generate
from kvjax.decode.prefill import CHUNKS, chunk_length, chunks, prefill
from kvjax.decode.sampling import Sampling
from kvjax.decode.step import decode_step, extend_step, head_step, prefill_step, score_step
from kvjax.decode.tracing import assert_max_traces, trace_counts

__all__ = [
    "CHUNKS",
    "Sampling",
    "assert_max_traces",
    "chunk_length",
    "chunks",
    "decode_step",
    "extend_step",
    "generate",
    "head_step",
    "prefill",
    "prefill_step",
    "score_step",
    "trace_counts",
]
