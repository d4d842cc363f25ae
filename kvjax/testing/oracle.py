"""Dense float64 attention in NumPy: explicit positions, explicit visible sets, no cache."""

import numpy as np


def rotate(x: np.ndarray, positions: np.ndarray, inverse_frequencies: np.ndarray) -> np.ndarray:
    """Rotate x [..., H] to `positions` [...] (half-split pairs), in float64."""
    angles = np.asarray(positions, np.float64)[..., None] * inverse_frequencies.astype(np.float64)
    half = angles.shape[-1]
    low, high, rest = np.split(np.asarray(x, np.float64), (half, 2 * half), axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def attend(
    query: np.ndarray,  # [N, H]
    keys: np.ndarray,  # [S, K, H]
    values: np.ndarray,  # [S, K, Hv]
    visible: np.ndarray,  # bool[S]
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend from one token; returns output [N, Hv] and logsumexp [N]; 0 and -inf if it is alone.

    >>> one = np.ones((1, 2))
    >>> attend(one, one[:, None], one[:, None], np.array([True]))[0].tolist()
    [[1.0, 1.0]]
    """
    N, H = query.shape
    K = keys.shape[1]
    scale = H**-0.5 if scale is None else scale
    output = np.zeros((N, values.shape[-1]))
    lse = np.full(N, -np.inf)
    if not visible.any():
        return output, lse
    for n in range(N):
        k = keys[visible, n // (N // K)].astype(np.float64)
        v = values[visible, n // (N // K)].astype(np.float64)
        scores = scale * (k @ query[n].astype(np.float64))
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max()
        weights = np.exp(scores - top)
        output[n] = weights @ v / weights.sum()
        lse[n] = top + np.log(weights.sum())
    return output, lse
