"""`load` and `LanguageModel`: a real decoder with the cache as one value of its config."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.cache.config import CacheConfig, LayerPattern
from kvjax.cache.spec import make_spec
from kvjax.checkpoints import Placement, Tokenizer, load_checkpoint, save_checkpoint
from kvjax.decode.generate import bucket, generate
from kvjax.decode.prefill import chunks
from kvjax.decode.sampling import Sampling
from kvjax.decode.step import score_step
from kvjax.dims import CacheDims
from kvjax.errors import CapacityError, ConfigError
from kvjax.nn.config import TransformerConfig
from kvjax.nn.transformer import Transformer

CacheChoice = CacheConfig | LayerPattern
Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `LanguageModel.generate` returns, one element a prompt.

    Attributes:
        tokens: new ids; a stop token is the last of them.
        text: the new ids as text, without special tokens.
        logprobs: log-probability of each new token under the model itself, before temperature,
            penalties and filters.
        reasons: "stop", "length", or "not finite" (the model gave NaN).
    """

    tokens: list[list[int]]
    text: list[str]
    logprobs: list[list[float]]
    reasons: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model, its weights and its tokenizer.

    Attributes:
        model: the Flax module: `model.apply(params, tokens, positions, cache)`.
        params: its parameters.
        config: sizes and constants.
        tokenizer: text to ids and back; None if the checkpoint has none.
        name: of the checkpoint.
        eos_ids: tokens that end a text.
    """

    model: Transformer
    params: Any = dataclasses.field(repr=False)
    config: TransformerConfig
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    name: str
    eos_ids: tuple[int, ...] = ()

    @property
    def dims(self) -> CacheDims:
        """What a cache must know of this model."""
        return self.config.cache_dims(self.model.dtype)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over config, dtype and all weights, 16 hex digits."""
        digest = hashlib.sha256(repr((self.config, self.model.dtype)).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(jax.tree_util.keystr(path).encode())
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model into a new folder, for `kvjax.load`; bits and dtypes are kept.

        Raises:
            CheckpointError: the folder exists.
        """
        save_checkpoint(
            os.fspath(folder),
            config=self.config,
            params=self.params,
            name=self.name,
            eos_ids=self.eos_ids,
            tokenizer=self.tokenizer,
        )

    def logits(self, tokens) -> jax.Array:
        """Logits f32[B, T, V] of `tokens` [B, T], without a cache.

        Raises:
            CapacityError: the text is longer than the model's positions.
        """
        tokens = self._batch(tokens)
        if tokens.shape[1] > self.config.max_len:
            raise CapacityError(
                f"{tokens.shape[1]} tokens exceed the model's {self.config.max_len} positions"
            )
        return _uncached_logits(self.model, self.params, tokens)

    def teacher_forced(
        self, tokens, cache: CacheChoice | None = None, chunk: int = 256, max_len: int | None = None
    ) -> Iterator[tuple[int, jax.Array]]:
        """Feed `tokens` [B, T] through a cache, `chunk` at a time; chunk=1 is the decode path.

        Yields:
            start and logits f32[B, t, V] of tokens[:, start : start + t].
        """
        tokens = self._batch(tokens)
        B, T = tokens.shape
        if chunk < 1:
            raise ConfigError(f"chunk={chunk} must be at least 1")
        max_len = self._room(cache, T, 0, max_len)
        state = self._empty(cache, B, max_len)
        start = 0
        for piece, counts in chunks(np.asarray(tokens).tolist(), chunk):
            logits, state = score_step(self.model, self.params, piece, counts, state)
            t = min(piece.shape[1], T - start)
            yield start, logits[:, :t]
            start += t
        state.check()

    def log_likelihood(
        self, tokens, cache: CacheChoice | None = None, chunk: int = 256, max_len: int | None = None
    ) -> np.ndarray:
        """Log-probability of each next token, teacher-forced through a cache: f32[B, T - 1].

        Element t belongs to token t + 1. A token is seen in the same precision whatever `chunk`
        is, so `chunk=1` (the decode path) gives the same figures.
        """
        tokens = self._batch(tokens)
        _, T = tokens.shape
        scores = [np.zeros((len(tokens), 0), np.float32)]
        for start, logits in self.teacher_forced(tokens, cache, chunk, max_len):
            t = min(logits.shape[1], T - 1 - start)
            if t > 0:
                following = tokens[:, start + 1 : start + 1 + t]
                scores.append(np.asarray(_next_logprobs(logits[:, :t], following)))
        return np.concatenate(scores, axis=1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        cache: CacheChoice | None = None,
        max_new_tokens: int = 32,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] | Sequence[Sequence[int]] | None = None,
        on_token: Callable[[int, int], None] | None = None,
        max_len: int | None = None,
    ) -> Generation:
        """Continue prompts, each as if it were alone.

        Args:
            prompts: one prompt or several; each is text or a list of token ids.
            cache: which cache; None is the exact contiguous one.
            max_new_tokens: most new tokens of each prompt.
            sampling: settings of all prompts (prompt b then draws from seed + b), or one for each.
                None is greedy.
            stop: token ids that end an output, for all prompts or a list for each; None is the
                checkpoint's own.
            on_token: called as on_token(prompt index, token id) when a token is there.
            max_len: capacity of the cache in tokens; None is the next power of two that holds the
                prompts and their outputs, so that new lengths rarely compile.

        Raises:
            CapacityError: a prompt and its new tokens do not fit, before anything runs.
            ConfigError: an empty prompt, a token outside the vocabulary, a bad setting.
        """
        rows = [self._prompt_ids(prompt, b) for b, prompt in enumerate(_as_list(prompts))]
        if not rows:
            raise ConfigError("no prompts were given")
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 0")
        longest = max(map(len, rows))
        max_len = self._room(cache, longest, max_new_tokens, max_len)
        settings = _spread_sampling(sampling, len(rows))
        stops = self._stops(stop, len(rows))
        if max_new_tokens == 0:
            empty: list[list[Any]] = [[] for _ in rows]
            return Generation(
                tokens=empty,
                text=["" for _ in rows],
                logprobs=empty,
                reasons=["length"] * len(rows),
            )
        state = self._empty(cache, len(rows), max_len)
        tokens, logprobs, reasons, _ = generate(
            self.model,
            self.params,
            state,
            rows,
            vocab_size=self.config.vocab_size,
            max_new_tokens=max_new_tokens,
            settings=settings,
            stops=stops,
            on_token=on_token,
        )
        text = [
            "" if self.tokenizer is None else self.tokenizer.decode(row, skip_special_tokens=True)
            for row in tokens
        ]
        return Generation(tokens=tokens, text=text, logprobs=logprobs, reasons=reasons)

    def _batch(self, tokens) -> jax.Array:
        array = _as_integers(tokens, "tokens")
        if array.ndim == 1:
            array = array[None]
        if array.ndim != 2 or 0 in array.shape:
            raise ConfigError(f"tokens must be [B, T] and not empty, got {array.shape}")
        self._check_vocabulary(array, "tokens")
        return jnp.asarray(array, jnp.int32)

    def _prompt_ids(self, prompt: Prompt, index: int) -> list[int]:
        if type(prompt) is str:
            if self.tokenizer is None:
                raise ConfigError(f"{self.name} has no tokenizer: give prompts as token ids")
            prompt = self.tokenizer.encode(prompt)
        ids = _as_integers(prompt, f"prompt {index}")
        if ids.ndim != 1 or ids.size == 0:
            raise ConfigError(f"prompt {index} is empty: nothing to continue")
        self._check_vocabulary(ids, f"prompt {index}")
        return ids.tolist()

    def _check_vocabulary(self, ids: np.ndarray, what: str) -> None:
        V = self.config.vocab_size
        outside = ids[(ids < 0) | (ids >= V)]
        if outside.size:
            raise ConfigError(f"{what}: token id {outside[0]} is outside the vocabulary 0..{V - 1}")

    def _empty(self, cache: CacheChoice | None, batch: int, max_len: int) -> Cache:
        """An empty cache; raises ConfigError where its kernels cannot run here."""
        empty = (cache or CacheConfig()).init(self.dims, batch, max_len)
        _ = empty.implementations
        return empty

    def _room(self, cache: CacheChoice | None, prompt: int, new: int, max_len: int | None) -> int:
        """Capacity to allocate; raises if prompt and new tokens do not fit."""
        need = prompt + new
        if need >= 2**31:
            raise CapacityError(f"{need} tokens: positions are int32")
        layers = (cache or CacheConfig()).for_layers(self.config.num_layers)
        if max(map(functools.partial(_largest_position, need), layers)) >= self.config.max_len:
            raise CapacityError(
                f"{prompt} prompt + {new} new tokens = {need} exceed the model's "
                f"{self.config.max_len} positions; shorten them, or stream with "
                "positions='unrotated_slot' and a window"
            )
        if max_len is None:
            return bucket(need) if new else need
        capacity = make_spec(cache or CacheConfig(), self.dims, 1, max_len).capacity
        if capacity is not None and need > capacity:
            raise CapacityError(
                f"{prompt} prompt + {new} new tokens = {need} exceed the cache's {capacity}; "
                f"give max_len={need} or more"
            )
        return max_len

    def _stops(self, stop, count: int) -> list[list[int]]:
        if stop is None:
            return [list(self.eos_ids)] * count
        rows = list(stop)
        if all(np.ndim(row) == 0 for row in rows):
            rows = [rows] * count
        if len(rows) != count:
            raise ConfigError(f"stop has {len(rows)} lists for {count} prompts")
        for row in rows:
            self._check_vocabulary(np.asarray(row, np.int64).reshape(-1), "stop")
        return [[int(i) for i in row] for row in rows]


def _largest_position(length: int, layer: CacheConfig) -> int:
    """Largest rotary position that a text of `length` tokens meets in a layer."""
    newest = np.asarray([length - 1], np.int32)
    lag = int(layer.policy.shift(jnp.asarray(newest))[0]) if layer.positions.slot else 0
    return length - 1 - lag


def _as_integers(values: Any, what: str) -> np.ndarray:
    """Ids as an array; empty lists pass, and are refused by shape."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ConfigError(
            f"{what}: rows of different lengths; pad them or give them apart"
        ) from None
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{what} must be text or integer ids, got {values!r:.60}")
    return array


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Wrap a single prompt: text, or a list of ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts is None:
        raise ConfigError("no prompts were given")
    several = [isinstance(prompt, str) or np.ndim(prompt) > 0 for prompt in prompts]
    return list(prompts) if all(several) else [prompts]


def _spread_sampling(sampling, count: int) -> list[Sampling]:
    if sampling is None:
        return [Sampling()] * count
    if type(sampling) is Sampling:
        return [
            dataclasses.replace(sampling, seed=(sampling.seed + b) % 2**32) for b in range(count)
        ]
    if len(sampling) != count:
        raise ConfigError(f"sampling has {len(sampling)} settings for {count} prompts")
    return list(sampling)


@functools.partial(jax.jit, static_argnames=("model",))
def _uncached_logits(model, params, tokens):
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return model.apply(params, tokens, positions)[0]


@jax.jit
def _next_logprobs(logits, following):
    picked = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def load(
    source: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    context_len: int | None = None,
    sharding: Placement = None,
) -> LanguageModel:
    """Load a pretrained model.

    Args:
        source: a known name such as "smollm2-135m", a Hugging Face folder, a .gguf file, or a
            folder that `LanguageModel.save` wrote.
        dtype: of weights and activations, "float32" or "bfloat16". None is float32, or what was
            saved.
        context_len: positions to make room for, and the length of text that rotary positions are
            settled for where they depend on it ("dynamic", "longrope"); None is what the
            checkpoint states.
        sharding: where the weights go: None is the default device, a `jax.sharding.Sharding` is
            for all, a function gives one for each path and shape.

    Raises:
        CheckpointError: it is missing, broken, incomplete or of an unknown kind.
        ConfigError: `dtype` or `context_len` is none that the model offers.
        MissingPackageError: a package that carries the model is not installed.
    """
    checkpoint = load_checkpoint(
        os.fspath(source), dtype, context_len=context_len, sharding=sharding
    )
    return LanguageModel(
        model=Transformer(checkpoint.config, dtype=checkpoint.dtype),
        params=checkpoint.params,
        config=checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        name=checkpoint.name,
        eos_ids=tuple(checkpoint.eos_ids),
    )
