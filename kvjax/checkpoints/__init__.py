"""Read pretrained models: by name, from a Hugging Face folder, or from a GGUF file."""

from kvjax.checkpoints.checkpoint import Checkpoint
from kvjax.checkpoints.named import known_models, load_checkpoint
from kvjax.checkpoints.native import save_checkpoint
from kvjax.checkpoints.tensors import Placement
from kvjax.checkpoints.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "Placement",
    "Tokenizer",
    "known_models",
    "load_checkpoint",
    "save_checkpoint",
]
