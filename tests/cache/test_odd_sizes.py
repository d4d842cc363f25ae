"""The oracle check on sizes that nobody chose: odd head dims, any grouping, any lengths."""

import hypothesis
from hypothesis import strategies as st

from kvjax.testing import conformance

CONFIGS = list(conformance.legal_configs())
LATENT_CONFIGS = list(conformance.legal_configs("latent"))


@st.composite
def heads(draw) -> tuple:
    K = draw(st.integers(1, 3))
    case = conformance.KVCase(
        num_heads=K * draw(st.sampled_from([1, 2, 3, 5, 7])),
        num_kv_heads=K,
        head_dim=2 * draw(st.integers(1, 21)),
        value_dim=draw(st.integers(1, 41)),
    )
    return draw(st.sampled_from(CONFIGS)), case


@st.composite
def latents(draw) -> tuple:
    case = conformance.LatentCase(
        num_heads=draw(st.integers(1, 7)),
        latent_dim=draw(st.integers(1, 41)),
        rope_dim=2 * draw(st.integers(1, 12)),
        nope_dim=draw(st.integers(0, 21)),
        value_dim=draw(st.integers(1, 21)),
    )
    return draw(st.sampled_from(LATENT_CONFIGS)), case


@hypothesis.given(
    both=st.one_of(heads(), heads(), latents()),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 99),
)
def test_oracle_at_odd_sizes(both, lengths, seed):
    suite = conformance.Conformance(*both, seed=seed, lengths=lengths)
    suite.check_oracle()
    suite.check_bytes()
