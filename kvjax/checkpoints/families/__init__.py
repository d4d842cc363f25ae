"""Families of decoders that can be read: one file each, with a config map and a name map."""

from kvjax.checkpoints.families.base import Family
from kvjax.checkpoints.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from kvjax.checkpoints.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from kvjax.checkpoints.families.gpt_oss import GPT_OSS
from kvjax.checkpoints.families.llama import LLAMA
from kvjax.checkpoints.families.mistral import MISTRAL, MIXTRAL
from kvjax.checkpoints.families.olmo2 import OLMO2
from kvjax.checkpoints.families.phi3 import PHI3
from kvjax.checkpoints.families.qwen2 import QWEN2
from kvjax.checkpoints.families.qwen3 import QWEN3, QWEN3_MOE
from kvjax.checkpoints.families.smollm3 import SMOLLM3

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GEMMA2,
        GEMMA3_TEXT,
        GEMMA3,
        PHI3,
        SMOLLM3,
        OLMO2,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}

__all__ = ["FAMILIES", "Family"]
