"""Every tolerance of the tests, absolute on inputs of unit variance, with the reason.

Loosening one is a change of its own. Lossy codecs need none of their own: they are compared with
the oracle on the *decoded* values, and what decoding may lose is the codec's own `bound`.
"""

# Attention against a dense float64 oracle on the values as they are stored, by dtype of the query.
ATTENTION = {
    # 64 to 600 products and a softmax, each rounded to 2^-24 of numbers around 10: about 1e-6.
    "float32": 2e-5,
    # Products of 11-bit operands are exact in f32; the weights are narrowed to 2^-12 of themselves.
    "float16": 2e-3,
    # As above, with weights narrowed to 2^-9.
    "bfloat16": 2e-3,
}

# The log-sum-exp is never narrowed: f32 whatever the query's dtype.
LOGSUMEXP = 2e-5

# Two f32 formulas of the same thing, elementwise: a few roundings of numbers around 1.
ELEMENTWISE = 1e-6

# Logits and log-probabilities of a tiny f32 model with weights as they are initialized: logits of
# up to 4, two layers of the above. 3e-6 seen on an AMD EPYC, 1.5e-5 on an Intel Xeon, whose
# products of other shapes are summed in other orders. Three times larger weights make it 6e-5.
TINY_LOGITS = 2e-5

# The same through a lossy cache, where a code is rounded one way by chunks of one length and the
# other way by another if the value lies within its own f32 noise of the middle: seen in one row of
# 40 tokens of 100 (with 16-bit scales, which are rounded too, in one of 6). A flip moves one value
# by one step, which moved scores by up to 8e-4 with int8 codes and by 4e-2 with int4 (on an Intel
# Xeon, where other values lie within the noise). So every score must lie within TINY_FLIPPED, and
# half of the rows must hold no flip at all, which is what tells a flip from another precision.
TINY_FLIPPED = 6e-2
# Lossy codecs must lose at least this much of some score, or a test of them would show nothing.
TINY_LOST = 2e-2

# Log-probabilities of the same model in bf16: hidden states of about 4 are rounded to 2^-7 at each
# step, and keys that are stored unrotated are rounded before instead of after they turn; 4e-2 seen.
TINY_BFLOAT16 = 6e-2

# Largest difference from the original implementation, in standard deviations of its logits. Both
# compute in f32: 3e-6 to 3e-5 seen, and 6e-5 for phi3, whose frequencies differ by one unit in the
# last place (transformers computes them in f32), which position 56 and steep scores enlarge. What a
# wrong reading of a config changes is at least a hundred times as large (make.py sees to it).
FAMILY_LOGITS = 2e-4
