"""The oracle check on sizes that nobody chose: odd head dims, any grouping, any lengths."""

import hypothesis
from hypothesis import strategies as st

from kvjax.dims import CacheDims
from kvjax.testing import conformance

CONFIGS = list(conformance.legal_configs())


@st.composite
def sizes(draw) -> CacheDims:
    K = draw(st.integers(1, 3))
    return CacheDims(
        num_layers=1,
        num_heads=K * draw(st.sampled_from([1, 2, 3, 5, 7])),
        num_kv_heads=K,
        head_dim=2 * draw(st.integers(1, 21)),
        value_dim=draw(st.integers(1, 41)),
    )


@hypothesis.given(
    config=st.sampled_from(CONFIGS),
    dims=sizes(),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 99),
)
def test_oracle_at_odd_sizes(config, dims, lengths, seed):
    suite = conformance.Conformance(config, dims, seed, lengths)
    suite.check_oracle()
    suite.check_bytes()
